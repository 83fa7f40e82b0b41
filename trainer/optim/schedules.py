"""Learning-rate schedules, each a factor of `optim.lr` by step; and which of torch's schedules are supported.

Every schedule here warms up linearly over its first `warmup_steps` steps; step 0 already changes the weights.
Optimizers are torch's own, set in conf/optim.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, Optimizer, Rprop, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer.config.instantiate import instantiate
from trainer.errors import UserError
from trainer.nested import leaves
from trainer.optim.layout import is_dense

WATCHED = "eval/loss"  # the metric for ReduceLROnPlateau


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    return _decay(optimizer, total_steps, warmup_steps, final_fraction, lambda done: 1 - done)


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Half a cosine from 1 to `final_fraction` (Loshchilov & Hutter, SGDR, 2017, without restarts)."""
    return _decay(optimizer, total_steps, warmup_steps, final_fraction, lambda done: _half_cosine(1, 0, done))


def wsd(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    decay_fraction: float = 0.2,
    final_fraction: float = 0.0,
) -> LambdaLR:
    """Warm-up, stable, decay: 1 up to the last `decay_fraction` of the run, then straight down.

    The part before the decay does not depend on `total_steps`: a run that is extended continues as if it
    had had that length from the start (S. Hu et al., "MiniCPM", 2024, section 4).
    """
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction is {decay_fraction}, but must be above 0 and at most 1")
    return _decay(
        optimizer,
        total_steps,
        warmup_steps,
        final_fraction,
        lambda done: min(1.0, (1 - done) / decay_fraction),
    )


def one_cycle(
    optimizer: Optimizer,
    total_steps: int,
    rise_fraction: float = 0.3,
    initial_fraction: float = 0.04,
    final_fraction: float = 4e-6,
) -> LambdaLR:
    """Half a cosine up from `initial_fraction` to 1 in the first `rise_fraction` of the run, and one down.

    The factors are those of torch's OneCycleLR, which also changes the momentum, and ends with an error if a
    run is extended. Source: L. Smith and N. Topin, "Super-Convergence", 2018.
    """
    fractions = {"initial_fraction": initial_fraction, "final_fraction": final_fraction}
    for name, value in {**fractions, "rise_fraction": rise_fraction}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, but must be from 0 to 1")
    last, peak = total_steps - 1, rise_fraction * total_steps - 1

    def factor(step: int) -> float:
        if step < peak:
            return _half_cosine(initial_fraction, 1, step / peak)
        return _half_cosine(1, final_fraction, min(1.0, (step - peak) / (last - peak)) if peak < last else 1)

    return LambdaLR(optimizer, factor)


def _half_cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * done)) / 2


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _decay(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int,
    final_fraction: float,
    shape: Callable[[float], float],
) -> LambdaLR:
    if warmup_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps is {warmup_steps}, but this run ends after {total_steps} steps; set "
            f"schedule.warmup_steps={total_steps // 10} or another number below {total_steps}, or train "
            "longer (train.epochs, train.max_steps)"
        )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}, but must be at least 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction is {final_fraction}, but must be from 0 to 1")

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * shape(done))

    return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class ScheduleFacts:
    """The values for `auto` in a schedule's settings, by the names that schedules use."""

    total_steps: int
    steps_per_epoch: int | None  # None: a stream of unknown length

    @property
    def T_max(self) -> int:  # noqa: N802, CosineAnnealingLR's
        return self.total_steps

    @property
    def total_iters(self) -> int:  # LinearLR's, PolynomialLR's
        return self.total_steps


def build_schedule(node: dict[str, Any], optimizer: Optimizer, facts: ScheduleFacts) -> LRScheduler:
    """The schedule of `node`, with its nested ones (SequentialLR, ChainedScheduler)."""
    if not isinstance(nodes := node.get("schedulers"), list):
        return instantiate("schedule", node, optimizer, facts=facts)
    parts = [build_schedule(part, optimizer, facts) for part in nodes]
    if any(isinstance(part, ReduceLROnPlateau) for part in parts):
        raise UserError(
            "schedule.schedulers: ReduceLROnPlateau counts evaluations, and cannot be part of another"
        )
    rest = {key: value for key, value in node.items() if key != "schedulers"}
    return instantiate("schedule", rest, facts=facts, optimizer=optimizer, schedulers=parts)


def after_step(schedule: LRScheduler) -> None:
    """Advance `schedule` by an optimizer step; ReduceLROnPlateau counts evaluations instead.

    Raises:
        UserError: it has no further step, such as torch's OneCycleLR after its total_steps.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        return
    try:
        schedule.step()
    except ValueError as error:
        raise UserError(f"schedule: {type(schedule).__name__} has no further step: {error}") from error


def after_evaluation(schedule: LRScheduler, metrics: Mapping[str, float]) -> None:
    """Pass the metrics of an evaluation to ReduceLROnPlateau; `metrics` are the same on every rank.

    Raises:
        UserError: the task's evaluation returns no loss.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        if WATCHED not in metrics:
            raise UserError(f"schedule: ReduceLROnPlateau needs {WATCHED}; there is {', '.join(metrics)}")
        schedule.step(metrics[WATCHED])


def check_schedule(schedule: LRScheduler, evaluates: bool) -> None:
    """Raise UserError for a schedule that this run does not support."""
    if not isinstance(schedule, LRScheduler):
        raise UserError(f"schedule is a {type(schedule).__name__}; it must be a torch.optim.lr_scheduler")
    if not isinstance(schedule, ReduceLROnPlateau):
        return
    if not evaluates:
        raise UserError(
            f"schedule: ReduceLROnPlateau lowers the learning rate when {WATCHED} no longer falls, but "
            "train.eval_every_epochs=0 never evaluates; set it to 1"
        )
    if schedule.mode != "min":
        raise UserError(f"schedule.mode is {schedule.mode}, but {WATCHED} should fall; set it to min")


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step of `model`, or
    would not resume in the state in which it stopped.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or any optimizer whose step() needs no closure"
        )
    optimized: set[Tensor] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if (kept := _outside_of_state(optimizer, optimized)) is not None:
        raise UserError(
            f"optim: {name} keeps tensors in its attribute {kept}, which no checkpoint holds; let it keep "
            "them in self.state, under a parameter or a name"
        )
    sparse = sparse_weights(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, SparseAdam) and (dense := [names[p] for p in names if p in optimized - sparse]):
        raise UserError(
            f"optim: SparseAdam takes sparse gradients only, but {dense[0]} has dense ones ({len(dense)} of "
            f"{len(names)} parameters); use optim=adamw and embeddings with sparse=False, or optim=sgd"
        )
    takes_sparse = isinstance(optimizer, SGD | SparseAdam | Adagrad) or not _is_torchs(optimizer)
    if isinstance(optimizer, SGD | Adagrad) and any(
        group["weight_decay"] for group in optimizer.param_groups
    ):
        takes_sparse, name = False, f"{name} with weight_decay"  # weight decay of all rows is dense
    if not takes_sparse and (found := [names[p] for p in names if p in optimized & sparse]):
        raise UserError(
            f"optim: {name} takes no sparse gradients, but {found[0]} has them; build its embedding with "
            "sparse=False, or use optim=sgd optim.momentum=0 optim.weight_decay=0"
        )
    _check_choices(optimizer, names, optimized)


def _check_choices(optimizer: Optimizer, names: Mapping[nn.Parameter, str], optimized: set[Tensor]) -> None:
    """Raise UserError for options or state of `optimizer` that torch does not support here."""
    name, sharded = type(optimizer).__name__, [p for p in optimized if isinstance(p, DTensor)]
    chosen = {key for group in optimizer.param_groups for key, value in group.items() if value is True}
    on_cpu = [names[parameter] for parameter in names if parameter in optimized and parameter.is_cpu]
    if sharded and isinstance(optimizer, Adafactor):
        raise UserError(
            "optim: Adafactor keeps sums over rows and columns, which torch cannot compute for sharded "
            "parameters; use strategy=ddp, or optim=adamw"
        )
    unsharded = {"fused": isinstance(optimizer, SGD | Adagrad), "foreach": isinstance(optimizer, Rprop)}
    if found := [key for key in unsharded if sharded and unsharded[key] and key in chosen]:
        raise UserError(
            f"optim.{found[0]}=true: torch has no such step of {name} for sharded parameters; leave it out, "
            "or use strategy=ddp, or optim=adamw"
        )
    odd = [names[p] for p in names if p in optimized and p.is_cpu and not is_dense(p)]
    if "fused" in chosen and odd:
        raise UserError(
            f"optim.fused=true: {odd[0]} is a view with gaps or in another order, which torch's kernel takes "
            "for a contiguous one; leave it out, or make the parameter contiguous"
        )
    if "capturable" in chosen and on_cpu:
        raise UserError(
            f"optim.capturable=true is for steps in a CUDA graph, but {on_cpu[0]} is on the CPU: leave it out"
        )
    if "differentiable" in chosen:
        raise UserError("optim.differentiable=true is for gradients through a step; leave it out")


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _outside_of_state(optimizer: Optimizer, optimized: set[Tensor]) -> str | None:
    """The name of an attribute with tensors, or with a stateful optimizer, that is not in `state_dict`."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return None

    def is_own(value: object) -> bool:
        if isinstance(value, Optimizer):
            return value.state is not optimizer.state
        return isinstance(value, Tensor) and value not in optimized

    known = {"state", "param_groups", "defaults"}
    values = {name: value for name, value in vars(optimizer).items() if name not in known}
    return next((name for name, value in values.items() if any(map(is_own, leaves(value)))), None)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")
