"""The interface of strategies: how a model is distributed over processes and devices.

The trainer calls these methods and never checks the class. Defaults: a whole model on one device.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.backend_flags import DTYPES
from trainer.distributed.collectives import broadcast_buffers
from trainer.errors import UserError
from trainer.exact.sum_order import AS_THEY_COME, SumOrder
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import TrainState
from trainer.strategies.placement import devices_of, lay_out_channels_last, refuse_shared_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure
Phase = Literal["forward", "backward", "evaluation"]

Fill = Callable[[nn.Module], None]
"""Gives a module that may be on the meta device its initial values, on the CPU (a collective)."""


@dataclass(frozen=True)
class ComputeOptions:
    """How a model is computed under any strategy: settings of `train`, by the same names."""

    precision: str = "fp32"
    compile: bool = False
    compile_mode: str = "default"  # torch.compile's
    channels_last: bool = False  # weights of four dimensions have the memory format of images


class Report(Protocol):
    """What a strategy reports of its communication: by default nothing."""

    def metrics(self) -> dict[str, float]:
        """The measurements since the last call, for the log (a collective)."""
        return {}

    def plots(self) -> dict[str, "Figure"]:
        """Plots of the last `metrics`, for the log of one rank; slow, and not a collective."""
        return {}

    def summary(self) -> str:
        """A summary of the whole run for the user, at the end; may be empty (a collective)."""
        return ""

    def measured(self) -> dict[str, Any]:
        """For result.json: on rank 0 (a collective)."""
        return {}


class NoReport(Report):
    """Of a strategy that does not communicate, or does not measure it."""


class Strategy:
    """One whole model on one device; the others override what differs.

    Attributes:
        name: as in the setting.
        num_replicas: how many processes share the global batch.
        replica: the index of this process's share; from `num_replicas` on, it has none.
        device: where batches go.
        devices: all that this process uses.
        gradients_differ: whether ranks update different parameters, or different parts of them.
        algorithm: the choice of `comm` in force; known after `wrap`.
        notes: messages for the user about how the settings were applied.
        order: in which order micro-batches are added, set before `wrap`.
        report: what it tells of its communication; complete after `wrap`.
        not_whole: why this process alone cannot save the run, in a phrase; None if it holds all.
        fills_by_unit: whether `wrap` fills the model one unit after another, and shards each.
        uses: which parameters a step must use on each rank: "all", the "same" on each, or "any".
        num_dry_runs: passes until torch has laid out its buckets; see `trainer.dry_run`.
        copies_gradients: whether gradients are copied into buckets, which take memory of their own.
    """

    num_replicas = 1
    replica = 0
    algorithm = "native"
    not_whole: str | None = None
    gradients_differ = False
    fills_by_unit = False
    name = "single"
    uses = "any"
    num_dry_runs = 1
    copies_gradients = False
    order: SumOrder = AS_THEY_COME

    def __init__(self, device: torch.device, compute: ComputeOptions) -> None:
        self.device, self.devices = device, [device]
        self.compute = compute
        self.notes: list[str] = []
        self.report: Report = NoReport()

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        """Return the module to call in training.

        Args:
            model: equal on every rank; on the CPU, or on the meta device.
            fill: called with `model`, or modules in it, the same ones in the same order on every rank.
        """
        fill(model)
        model = self._placed(model)
        self.order.attach(model)
        if self.compute.compile:
            model.compile(mode=self.compute.compile_mode)
        return model

    def _placed(self, model: nn.Module) -> nn.Module:
        """The whole model where this process computes; one that is on several devices stays there.

        Such a model moves its own activations, and returns its output to the first of them.
        """
        if self.compute.channels_last:
            lay_out_channels_last(model)
        placed = devices_of(model)
        if len(placed) > 1:
            self.device, self.devices = placed[0], placed
            self.notes.append(f"the model has placed itself on {', '.join(map(str, placed))}")
            return model
        if self.device.type != "cpu":  # where each tensor gets memory of its own
            refuse_shared_memory(model, str(self.device))
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module within `model`: no prefix in its parameter names, no collective."""
        return model

    def prepare(self, state: TrainState) -> None:
        """Called after the dry run, before the first step, with all that training changes."""

    def follow_trainable(self, model: nn.Module) -> bool:
        """Prepare for steps with the parameters that require gradients now (a collective).

        Returns:
            Whether the caller must make a dry run, in which torch lays out its buckets.
        """
        self.order.follow_trainable(self.unwrap(model))
        return False

    def autocast(self) -> AbstractContextManager:
        """The context of the forward pass that gives `train.precision`."""
        if self.compute.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.compute.precision])

    def begin_step(self, model: nn.Module) -> None:
        """Called when a step begins: next come the gradients of this process (a collective)."""
        self.order.begin_step()

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0 (a collective): running statistics follow a rank's own data.

        Called before the first step, and after the passes of each step, so that between steps every rank has
        the same model.
        """
        if self.num_replicas > 1 and not self.order.by_chunks:
            broadcast_buffers(self.unwrap(model), src=0)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        """The context of one forward and backward; gradients are reduced across ranks only if `enabled`."""
        return self.order.chunk(enabled)

    def groups_of_a_pass(self) -> list[dist.ProcessGroup]:
        """Return the groups in which ranks wait for each other within a forward pass."""
        return []

    def aggregate(self, model: nn.Module) -> None:
        """Wait until the parameters that this process updates hold the mean of all replicas' gradients."""
        self.order.finish()

    def grad_norm(self, trainable: TrainableParameters) -> Tensor:
        """The norm of all gradients, a scalar, the same on every rank (a collective)."""
        return self.order.norm(trainable)

    def share_updates(self) -> None:
        """Give every rank the parameters that other ranks have just updated (a collective)."""

    def gathered(self, state: TrainState) -> AbstractContextManager:
        """The context of a save: rank 0 has the state that only other ranks had (a collective)."""
        return nullcontext()

    def weights_changed(self, model: nn.Module) -> None:
        """Called when the values of parameters were changed other than by a step (a collective)."""

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that have the same bits of what `replicated` yields; [] without any."""
        return []

    def replicated(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """Yield what the ranks of a group of `replica_groups` share, live, by name."""
        return state.replicated()

    def evaluating(self, model: nn.Module) -> AbstractContextManager:
        """The context in which a task evaluates the module that `unwrap` returns (a collective)."""
        return self.explaining("evaluation")

    @contextmanager
    def explaining(self, phase: Phase) -> Iterator[None]:
        """Raise a UserError for an error of torch that `explain` knows."""
        try:
            yield
        except (RuntimeError, AttributeError, TypeError) as error:
            if (explained := self.explain(error, phase)) is not None:
                raise explained from error
            raise

    def explain(self, error: Exception, phase: Phase) -> UserError | None:
        """Return a UserError with the cause and the way out for an error of torch; None if it is unknown."""
        return None

    def close(self) -> None:
        """End threads and groups; called once, after a successful run."""


def grad_scaler(strategy: Strategy) -> torch.amp.GradScaler:
    """fp16 needs a scaled loss to keep small gradients; otherwise the scaler does nothing."""
    device, enabled = strategy.device, strategy.compute.precision == "fp16"
    if not strategy.gradients_differ:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # An overflow in what one rank updates must skip the step on all.
    # Its own default is the group of all ranks that was there when torch's module was loaded.
    scaler = ShardedGradScaler(device.type, enabled=enabled, process_group=None)
    scaler.scale(torch.zeros((), device=device))  # torch makes its scale at the first loss; a server has none
    return scaler


def parameter_count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
