"""The dry run: a forward and backward pass before the first step, which checks user code.

A step repeats it when the parameters that it trains have changed, and torch must lay out its buckets again.

It leaves no trace: buffers, extra state, global random generators and gradients are as before. DDP lays out
its buckets after it, in the order in which the pass filled them, in new and in resumed runs alike: the place
of an element decides the order in which an all-reduce adds the ranks' values, and so its last bit. Code that
counts its own calls in plain attributes, or draws from a generator of its own, does so once more. After a
resume, weights that the pass changes are read again in `Checkpointer.check`.
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
from trainer.model.plain_names import keepers_of_extra_state, named_buffers
from trainer.strategies.placement import not_all
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

    With train.exact it is all of its micro-batches, since chunks of all ranks are averaged.

    Returns:
        The parameters that a forward or backward pass changes on this rank.

    Raises:
        UserError: something in the model, the task or the loss cannot be trained as it is; most errors on
            every rank alike.
    """
    begin, micro_batches = time.perf_counter(), batches.ahead()
    _compare_data(run, batches.first_read())
    run.ranks.heartbeat.step = run.state.progress.step + 1
    changed = make_dry_run(run, micro_batches, begins_step=True)
    run.strategy.prepare(run.state)
    log.info("dry run of one step: ok, %.2f s", time.perf_counter() - begin)
    return changed


def make_dry_run(run: Run, micro_batches: Sequence[Any], begins_step: bool = False) -> list[str]:
    """Compute gradients of the first of these micro-batches, and drop them (a collective).

    Returns:
        As `dry_run`.

    Args:
        begins_step: whether to call the task's `begin_step`; otherwise the step has already called it.
    """
    strategy = run.strategy
    is_exact = strategy.order.by_chunks
    own = micro_batches if is_exact else micro_batches[:1]
    model, heartbeat = run.state.model, run.ranks.heartbeat
    is_sharded = run.state.trainable.is_sharded
    gathered = GatheredParameters(model) if is_sharded else None
    weights = {} if is_sharded else bit_sums(model.named_parameters())
    versions = {} if is_sharded else _versions(model)
    with generators_kept(), traceless(model):
        if begins_step:
            other_trained = begin_step_of_task(run, heartbeat.step)
            if any(gather_objects(other_trained)):
                follow_begin_step(run)
        trained = run.state.trainable.trainable()
        for _ in range(strategy.num_dry_runs):
            _drop_gradients(model)
            strategy.begin_step(run.model)
            buffers = list[Tensor]()
            for number, batch in enumerate(own):
                _make_pass(run, batch, number, number + 1 == len(own), gathered)
                buffers.append(run.guards.buffers.hashes())
            heartbeat.skip(("forward", "backward"), run.data.split.fewer if is_exact else 1 - len(own))
            changed = _changed(model, weights, versions)
            if is_exact:
                _refuse_what_outlives_a_chunk(changed)
            idle = [name for name, parameter in trained.items() if parameter.grad is None]
            if strategy.uses == "all" and own and idle and not is_exact:
                raise UserError(f"strategy=ddp: the loss used {not_all(idle)}")
            strategy.aggregate(run.model)
            run.guards.buffers.compare(buffers)
    has_gradients = any(p.grad is not None for p in trained.values())
    if not any(gather_objects(has_gradients)):
        raise UserError(f"the first backward pass gave no parameter a gradient. {_no_gradients(is_sharded)}")
    if gathered is not None:
        gathered.close()
    run.state.check_gradients()
    _drop_gradients(model)
    run.guards.snapshot.note_changed_weights(changed)
    return changed


def _compare_data(run: Run, first: Mapping[int, int]) -> None:
    """Refuse a stream that is not the same on all ranks, and warn of other data (a collective).

    Args:
        first: hashes of samples that all ranks have read, by their numbers: of data by index sample 0; of a
            stream the first ones, since each rank also reads those before its own.
    """
    known: dict[int, tuple[int, int]] = {}
    for rank, theirs in enumerate(gather_objects(first)):
        for number, value in theirs.items():
            before, expected = known.setdefault(number, (rank, value))
            if value == expected:
                continue
            reads = f"{run.ranks.describe(rank)} reads another sample {number} of the training"
            if not run.data.train_loader.is_stream:
                if run.ranks.is_main:
                    log.warning(
                        "%s data than rank %d. If the dataset divides itself by rank, leave that out: ranks "
                        "divide it, and would never see the rest. If it draws from a generator of its own, "
                        "seed that from the index. If hosts hold other files, give them the same",
                        *(reads, before),
                    )
                return
            raise UserError(
                f"{reads} stream than rank {before}, but ranks take turns in one that is the same on all. If "
                "it divides itself by rank, leave that out, or give it the attribute divides_itself = True; "
                "if it draws an order, seed that from set_epoch's epoch (divides_itself = False: no such "
                "check)"
            )


def _make_pass(run: Run, batch: Any, number: int, last: bool, gathered: "GatheredParameters | None") -> None:
    """Make the pass of the `number`-th micro-batch; in the first one, look at what user code does."""
    enter = run.ranks.heartbeat.enter

    def between(loss: Any, parts: Any) -> Tensor:
        if not number:
            _look_at_loss(run, loss, gathered)
        enter("backward")
        return loss

    strategy, count = run.strategy, count_labels(run.task, batch, run.data.split)
    enter("forward")
    seed_micro_batch(
        run.seed, run.state.progress.step + 1, run.data.first_micro_batch + number, strategy.devices
    )
    forward_backward(strategy, run.task, run.model, run.data.to_device(batch), between, count, last)


@contextmanager
def traceless(model: nn.Module) -> Iterator[None]:
    """Put buffers and extra state back afterwards.

    A buffer that the passes made, or made larger, stays: its module may know its size.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    keepers = keepers_of_extra_state(model).values()
    states = [copy.deepcopy(keeper.get_extra_state()) for keeper in keepers]
    yield
    with torch.no_grad():
        for name, buffer in named_buffers(model):
            was = buffers.get(name)
            if was is not None and was.shape == buffer.shape and not same_bits(was, buffer.detach()):
                buffer.copy_(was)
    for keeper, state in zip(keepers, states, strict=True):
        keeper.set_extra_state(state)


def _look_at_loss(run: Run, loss: Any, gathered: "GatheredParameters | None") -> None:
    """Refuse a loss that can't be differentiated, or not alike on all ranks (a collective)."""
    refuse_changed_by_loss(run)
    names: dict[Tensor, str] = {p: name for name, p in run.state.model.named_parameters()}
    if gathered is not None:
        gathered.compare_root()
        names |= gathered.names
    _check_loss(run.task, loss, names)
    if any(parameter.grad is not None for parameter in names):
        raise UserError(
            f"{type(run.task).__name__}.loss gives parameters gradients, as backward() does, but they are "
            "the sum over micro-batches and ranks; return the loss, to which the trainer applies backward(), "
            "and compute gradients within it by torch.autograd.grad"
        )
    if run.strategy.uses != "any":
        _compare_use(run, loss, names)


def _check_loss(task: Task, loss: Any, names: Mapping[Tensor, str]) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad or loss.is_complex():
        raise UserError(
            f"{type(task).__name__}.loss returns {described(loss)}, but must return a scalar to "
            "differentiate, a mean; or that and a dict of its parts by name, for the log"
        )
    refuse_own_parameters(task, set(map(id, names)))


def _compare_use(run: Run, loss: Tensor, names: dict[Tensor, str]) -> None:
    """Refuse ranks that use different parameters, before they reduce anything (a collective).

    The graph shows which ones a backward pass will reach. DDP would wait for a gradient for ever, and FSDP,
    which reduces all gradients of a unit as one row, would add unrelated ones.
    """
    strategy = run.strategy
    own = {names[leaf] for leaf in _leaves(loss) if leaf in names}
    if not differs(sorted(own)):
        return
    everyones = gather_objects(own)
    num_users = Counter(name for used in everyones for name in used)
    differ = [name for name in dict.fromkeys(names.values()) if 0 < num_users[name] < len(everyones)]
    uses, others = (
        ", ".join(str(rank) for rank, used in enumerate(everyones) if (differ[0] in used) is is_used)
        for is_used in (True, False)
    )
    raise UserError(
        f"strategy={strategy.name}: the loss uses {first_few(differ, 1)} on rank {uses} and not on {others}, "
        "but ranks reduce their gradients together. Let all ranks use the same parameters in a step, or set "
        "strategy.find_unused_parameters=true"
    )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors to which a backward pass from `loss` gives gradients."""
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
    """How often each parameter was written; that shows a teacher which still equals its student, too."""
    return {name: 0 if p.is_inference() else version_of(p) for name, p in model.named_parameters()}


def _changed(model: nn.Module, weights: Mapping[str, int], versions: Mapping[str, int]) -> list[str]:
    """The parameters that were written since, with or without torch counting it."""
    if not weights:
        return []
    by_bits, now = changed_bits(weights, model.named_parameters()), _versions(model)
    return [name for name in weights if name in by_bits or now.get(name) != versions[name]]


def _no_gradients(is_sharded: bool) -> str:
    """Why, and the way out."""
    if is_sharded:
        return (
            "Either the loss depends on none of them; or the model returns an object: torch's fully_shard "
            "finds outputs in tensors, tuples, lists, dicts and dataclasses; return one; or the loss uses "
            "parameters of a unit, but not its output, which strategy.reshard_after_forward=false trains; or "
            "use strategy=ddp"
        )
    return (
        "The loss depends on none of them, as behind detach(), item() or NumPy: return one that is computed "
        "from the model's outputs by differentiable operations"
    )


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _refuse_what_outlives_a_chunk(changed: Sequence[str]) -> None:
    """With train.exact: a chunk must leave nothing to the next one, which may be on another rank."""
    if changed:
        raise UserError(
            f"train.exact: a forward or backward pass changes {changed[0]}, and each part of the batch would "
            "find what those before it on its rank have left; change weights in the optimizer alone, or "
            "compute with another tensor, or set train.exact=null"
        )
