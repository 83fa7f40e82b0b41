"""The dry run of a step: a forward and backward pass before the first step, which checks user code.

It is repeated when a step changes which parameters are trainable, because DDP must then rebuild its buckets.

Buffers, extra state, global random generators and gradients are restored afterwards. In new and resumed runs
alike, DDP rebuilds its buckets after this pass, in the order in which gradients became ready. This matters,
because the position of an element in a bucket determines the order in which an all-reduce adds the ranks'
values, and so the last bit of the sum. User code that counts its calls in plain attributes, or draws from its
own generator, does so one more time. After a resume, `Checkpointer.check` restores weights that the pass
changed.
"""

import copy
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.context import Run
from trainer.data.loading.loaders import Batches
from trainer.distributed.agreement import differs, gather_objects
from trainer.dry_run.gathered_parameters import GatheredParameters
from trainer.errors import UserError, first_few
from trainer.forward_backward import forward_backward
from trainer.model.plain_names import modules_with_extra_state, named_buffers
from trainer.strategies.placement import unused_parameters
from trainer.task_hooks import begin_step_of_task, follow_begin_step, refuse_changed_by_loss
from trainer.tasks import Task
from trainer.tasks.base import refuse_own_parameters
from trainer.tasks.label_counts import count_labels, described
from trainer.tensors.bits import bit_sums, changed_bits, same_bits
from trainer.tensors.generators import generators_kept, seed_micro_batch
from trainer.torch_private import version_of

log = logging.getLogger(__name__)


def dry_run(run: Run, batches: Batches) -> list[str]:
    """Compute gradients of the first micro-batch of the next step of `batches` (a collective).

    With train.exact, use all of the step's micro-batches, because the chunks of all ranks are averaged.

    Returns:
        The names of the parameters that the forward or backward pass changes on this rank.

    Raises:
        UserError: the model, the task or the loss cannot be trained; raised on every rank in most cases.
    """
    start, micro_batches = time.perf_counter(), batches.ahead()
    _compare_data(run, batches.first_read())
    run.ranks.heartbeat.step = run.state.progress.step + 1
    changed = dry_run_passes(run, micro_batches, begins_step=True)
    run.strategy.prepare(run.state)
    log.info("dry run of one step: ok, %.2f s", time.perf_counter() - start)
    return changed


def dry_run_passes(run: Run, micro_batches: Sequence[Any], begins_step: bool = False) -> list[str]:
    """Compute and drop gradients like `dry_run`, and return the same names (a collective).

    Args:
        begins_step: whether to call the task's `begin_step`, because no step has called it yet.
    """
    strategy = run.strategy
    is_exact = strategy.order.by_chunks
    own = micro_batches if is_exact else micro_batches[:1]
    model, heartbeat = run.state.model, run.ranks.heartbeat
    is_sharded = run.state.trainable.is_sharded
    gathered = GatheredParameters(model) if is_sharded else None
    weights = {} if is_sharded else bit_sums(model.named_parameters())
    versions = {} if is_sharded else _versions(model)
    with generators_kept(), state_restored(model):
        if begins_step:
            trainable_changed = begin_step_of_task(run, heartbeat.step)
            if any(gather_objects(trainable_changed)):
                follow_begin_step(run)
        trainable = run.state.trainable.trainable()
        for _ in range(strategy.num_dry_runs):
            _drop_gradients(model)
            strategy.begin_step(run.model)
            buffers = list[Tensor]()
            for number, batch in enumerate(own):
                _run_pass(run, batch, number, number + 1 == len(own), gathered)
                buffers.append(run.guards.buffers.hashes())
            heartbeat.skip(("forward", "backward"), run.data.split.fewer if is_exact else 1 - len(own))
            changed = _changed(model, weights, versions)
            if is_exact:
                _refuse_changed_weights(changed)
            unused = [name for name, parameter in trainable.items() if parameter.grad is None]
            if strategy.uses == "all" and own and unused and not is_exact:
                raise UserError(f"strategy=ddp: the loss did not use {unused_parameters(unused)}")
            strategy.aggregate(run.model)
            run.guards.buffers.compare(buffers)
    has_gradients = any(p.grad is not None for p in trainable.values())
    if not any(gather_objects(has_gradients)):
        raise UserError(f"no parameter received a gradient in the first backward pass. {_causes(is_sharded)}")
    if gathered is not None:
        gathered.close()
    _drop_gradients(model)
    run.guards.snapshot.note_changed_weights(changed)
    return changed


def _compare_data(run: Run, first: Mapping[int, int]) -> None:
    """Warn if ranks read different data, or raise UserError if they read different streams (a collective).

    Args:
        first: the hashes that this rank computed, by sample number: for map-style data, of sample 0, which
            every rank reads; for a stream, of its samples up to the first one that this rank trains on.
    """
    known: dict[int, tuple[int, int]] = {}
    for rank, hashes in enumerate(gather_objects(first)):
        for number, value in hashes.items():
            other_rank, expected = known.setdefault(number, (rank, value))
            if value == expected:
                continue
            differs_in = f"{run.ranks.describe(rank)} reads a different sample {number} of the training"
            if not run.data.train_loader.is_stream:
                if run.ranks.is_main:
                    log.warning(
                        "%s data than rank %d. If the dataset divides itself by rank, remove that: the "
                        "trainer divides it, and some samples would never be used. If it draws from its own "
                        "generator, seed that generator from the index. If hosts have different files, make "
                        "them equal",
                        *(differs_in, other_rank),
                    )
                return
            raise UserError(
                f"{differs_in} stream than rank {other_rank}, but all ranks must read the same stream; the "
                "trainer divides it. If the stream divides itself by rank, remove that, or set its attribute "
                "divides_itself = True. If it is shuffled, seed the shuffle from the epoch of set_epoch. "
                "divides_itself = False disables this check"
            )


def _run_pass(run: Run, batch: Any, number: int, last: bool, gathered: "GatheredParameters | None") -> None:
    enter = run.ranks.heartbeat.enter

    def on_loss(loss: Any, parts: Any) -> Tensor:
        if not number:
            _check_loss(run, loss, gathered)
        enter("backward")
        return loss

    strategy, count = run.strategy, count_labels(run.task, batch, run.data.split)
    enter("forward")
    seed_micro_batch(
        run.seed, run.state.progress.step + 1, run.data.first_micro_batch + number, strategy.devices
    )
    forward_backward(strategy, run.task, run.model, run.data.to_device(batch), on_loss, count, last)


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and extra state at the end of the context.

    Buffers that were created or resized in the context stay, because their module may rely on the size.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    keepers = modules_with_extra_state(model).values()
    states = [copy.deepcopy(keeper.get_extra_state()) for keeper in keepers]
    yield
    with torch.no_grad():
        for name, buffer in named_buffers(model):
            saved = buffers.get(name)
            if saved is not None and saved.shape == buffer.shape and not same_bits(saved, buffer.detach()):
                buffer.copy_(saved)
    for keeper, state in zip(keepers, states, strict=True):
        keeper.set_extra_state(state)


def _check_loss(run: Run, loss: Any, gathered: "GatheredParameters | None") -> None:
    """Raise UserError if the loss has no gradient, or depends on different parameters on different ranks."""
    refuse_changed_by_loss(run)
    names: dict[Tensor, str] = {p: name for name, p in run.state.model.named_parameters()}
    if gathered is not None:
        gathered.compare_root()
        names |= gathered.names
    _check_type(run.task, loss, names)
    if any(parameter.grad is not None for parameter in names):
        raise UserError(
            f"{type(run.task).__name__}.loss sets the gradients of parameters, as backward() does; return "
            "the loss instead: the trainer calls backward() and sums gradients over micro-batches and ranks. "
            "Use torch.autograd.grad for gradients that the loss itself needs"
        )
    if run.strategy.uses != "any":
        _compare_use(run, loss, names)


def _check_type(task: Task, loss: Any, names: Mapping[Tensor, str]) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad or loss.is_complex():
        raise UserError(
            f"{type(task).__name__}.loss returns {described(loss)}, but must return a scalar that requires "
            "gradients, usually a mean; or that scalar and a dict of its parts by name for the log"
        )
    refuse_own_parameters(task, set(map(id, names)))


def _compare_use(run: Run, loss: Tensor, names: dict[Tensor, str]) -> None:
    """Raise UserError if ranks use different parameters (a collective). Call it before gradients are reduced.

    The graph shows which parameters a backward pass will reach. Without this check, DDP would wait forever
    for a gradient. FSDP reduces all gradients of a unit as one tensor, and would add unrelated gradients.
    """
    strategy = run.strategy
    own = {names[leaf] for leaf in _leaves(loss) if leaf in names}
    if not differs(sorted(own)):
        return
    used_by_rank = gather_objects(own)
    num_users = Counter(name for used in used_by_rank for name in used)
    differ = [name for name in dict.fromkeys(names.values()) if 0 < num_users[name] < len(used_by_rank)]
    uses, others = (
        ", ".join(str(rank) for rank, used in enumerate(used_by_rank) if (differ[0] in used) is is_used)
        for is_used in (True, False)
    )
    raise UserError(
        f"strategy={strategy.name}: the loss uses {first_few(differ, 1)} on rank {uses} and not on {others}, "
        "but all ranks must take part in the reduction of each gradient. Use the same parameters on all "
        "ranks in a step, or set strategy.find_unused_parameters=true"
    )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    nodes = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        if (node := nodes.pop()) is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        nodes += new


def _versions(model: nn.Module) -> dict[str, int]:
    """Return the version counter of each parameter, which also increases if equal values are written."""
    return {name: 0 if p.is_inference() else version_of(p) for name, p in model.named_parameters()}


def _changed(model: nn.Module, weights: Mapping[str, int], versions: Mapping[str, int]) -> list[str]:
    """Return the names of parameters that were written after `versions`, even if torch did not count it."""
    if not weights:
        return []
    by_bits, now = changed_bits(weights, model.named_parameters()), _versions(model)
    return [name for name in weights if name in by_bits or now.get(name) != versions[name]]


def _causes(is_sharded: bool) -> str:
    if is_sharded:
        return (
            "Either the loss does not depend on the parameters. Or the model returns an object in which "
            "torch's fully_shard can't find the outputs: return a tensor, tuple, list, dict or dataclass. Or "
            "the loss uses parameters of a unit but not the unit's output: set "
            "strategy.reshard_after_forward=false, or use strategy=ddp"
        )
    return (
        "The loss does not depend on the parameters, for example because of detach(), item() or NumPy: "
        "compute it from the model's outputs by differentiable operations"
    )


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _refuse_changed_weights(changed: Sequence[str]) -> None:
    """Raise UserError if weights changed, because with train.exact a chunk must not affect the next one."""
    if changed:
        raise UserError(
            f"train.exact: the forward or backward pass changes {changed[0]}, so that the result for a chunk "
            "would depend on the previous chunks of its rank; change weights only in the optimizer, compute "
            "with another tensor, or set train.exact=null"
        )
