"""The interface of strategies: how a model is distributed over processes and devices.

The trainer calls these methods and never checks the class. The default methods are for a whole model on one
device.
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
from trainer.exact.sum_order import DEFAULT_ORDER, SumOrder
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import TrainState
from trainer.strategies.placement import devices_of, lay_out_channels_last, refuse_shared_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure
Phase = Literal["forward", "backward", "evaluation"]

Fill = Callable[[nn.Module], None]
"""Gives a module, which may be on the meta device, its initial values on the CPU (a collective)."""


@dataclass(frozen=True)
class ComputeOptions:
    """How a strategy computes the model: the settings in `train` with the same names."""

    precision: str = "fp32"
    compile: bool = False
    compile_mode: str = "default"  # the mode of torch.compile
    channels_last: bool = False  # use torch.channels_last for 4-dimensional weights


class Report(Protocol):
    """A strategy's report on its communication; empty by default."""

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call, for the log (a collective)."""
        return {}

    def plots(self) -> dict[str, "Figure"]:
        """Return plots of the last `metrics`, for the log of one rank. Slow, but not a collective."""
        return {}

    def summary(self) -> str:
        """Return a summary of the whole run for the user; may be empty (a collective)."""
        return ""

    def measured(self) -> dict[str, Any]:
        """Return the entries for result.json, complete on rank 0 (a collective)."""
        return {}


class NoReport(Report):
    """The report of a strategy that does not communicate, or does not measure its communication."""


class Strategy:
    """A whole model on one device; subclasses override what differs.

    Attributes:
        name: the value of the setting `strategy`.
        num_replicas: the number of processes among which the global batch is divided.
        replica: the index of this process's part of the batch; `num_replicas` or more on ranks without a
            part.
        device: the device to which batches are copied.
        devices: all devices that this process uses.
        gradients_differ: whether ranks update different parameters, or different shards of them.
        algorithm: the all-reduce algorithm in use, known after `wrap`.
        notes: messages for the user about how the settings were applied.
        order: the order in which gradients and losses are summed; must be set before `wrap`.
        report: the report on the communication; available after `wrap`.
        incomplete_reason: the reason why a single process cannot save the run, as a phrase; None if it can.
        fills_by_unit: whether `wrap` fills and shards the model one unit after another.
        uses: the parameters that a step must use on each rank: "all", the "same" on every rank, or "any".
        num_dry_runs: the number of passes until torch has built its buckets; see `trainer.dry_run`.
        copies_gradients: whether gradients are copied into buckets, which need additional memory.
    """

    num_replicas = 1
    replica = 0
    algorithm = "native"
    incomplete_reason: str | None = None
    gradients_differ = False
    fills_by_unit = False
    name = "single"
    uses = "any"
    num_dry_runs = 1
    copies_gradients = False
    order: SumOrder = DEFAULT_ORDER

    def __init__(self, device: torch.device, compute: ComputeOptions) -> None:
        self.device, self.devices = device, [device]
        self.compute = compute
        self.notes: list[str] = []
        self.report: Report = NoReport()

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        """Return the module to call in training.

        Args:
            model: on the CPU or the meta device, with the same names and shapes on every rank.
            fill: to be called with `model` or its submodules, in the same order on every rank.
        """
        fill(model)
        model = self._place(model)
        self.order.attach(model)
        if self.compute.compile:
            model.compile(mode=self.compute.compile_mode)
        return model

    def _place(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, unless its constructor placed it on several devices."""
        if self.compute.channels_last:
            lay_out_channels_last(model)
        placed = devices_of(model)
        if len(placed) > 1:
            self.device, self.devices = placed[0], placed
            self.notes.append(f"the model's constructor placed it on {', '.join(map(str, placed))}")
            return model
        if self.device.type != "cpu":  # model.to() gives each tensor separate memory
            refuse_shared_memory(model, str(self.device))
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module in `model`, whose parameter names have no prefix (not a collective)."""
        return model

    def prepare(self, state: TrainState) -> None:
        """Prepare for training `state`, between the dry run and the first step."""

    def follow_trainable(self, model: nn.Module) -> bool:
        """Prepare for steps that train the parameters that now require gradients (a collective).

        Returns:
            Whether the caller must do a dry run, during which torch builds its buckets.
        """
        self.order.follow_trainable(self.unwrap(model))
        return False

    def autocast(self) -> AbstractContextManager:
        """Return the context in which a forward pass runs in `train.precision`."""
        if self.compute.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.compute.precision])

    def begin_step(self, model: nn.Module) -> None:
        """Prepare for a step, before this process computes gradients (a collective)."""
        self.order.begin_step()

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, because running statistics differ (a collective).

        Called before the first step and after the last backward pass of each step, so that every rank has the
        same model between steps.
        """
        if self.num_replicas > 1 and not self.order.by_chunks:
            broadcast_buffers(self.unwrap(model), src=0)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        """Return the context of a forward and backward pass, with gradients reduced only if `enabled`."""
        return self.order.chunk(enabled)

    def forward_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups in which ranks wait for each other during a forward pass."""
        return []

    def aggregate(self, model: nn.Module) -> None:
        """Wait until the parameters that this process updates have the mean gradients of all replicas."""
        self.order.finish()

    def grad_norm(self, trainable: TrainableParameters) -> Tensor:
        """Return the norm of all gradients, a scalar that is the same on every rank (a collective)."""
        return self.order.norm(trainable)

    def share_updates(self) -> None:
        """Give every rank the parameters that other ranks updated in this step (a collective)."""

    def gathered(self, state: TrainState) -> AbstractContextManager:
        """Return the context of a save, within which rank 0 has the state of all ranks (a collective)."""
        return nullcontext()

    def weights_changed(self, model: nn.Module) -> None:
        """Called after parameters were changed by anything other than a step (a collective)."""

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks on which the tensors of `replicated` have the same bits; [] if none."""
        return []

    def replicated(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors, not copied, that are equal on all ranks of a replica group."""
        return state.replicated()

    def evaluating(self, model: nn.Module) -> AbstractContextManager:
        """Return the context in which a task evaluates the module returned by `unwrap` (a collective)."""
        return self.explaining("evaluation")

    @contextmanager
    def explaining(self, phase: Phase) -> Iterator[None]:
        """Replace an error raised by torch with a UserError if `explain` recognizes it."""
        try:
            yield
        except (RuntimeError, AttributeError, TypeError) as error:
            if (explained := self.explain(error, phase)) is not None:
                raise explained from error
            raise

    def explain(self, error: Exception, phase: Phase) -> UserError | None:
        """Return a UserError that explains an error raised by torch and how to fix it; None if unknown."""
        return None

    def close(self) -> None:
        """Stop threads and close connections. Call it once, after a successful run."""


def grad_scaler(strategy: Strategy) -> torch.amp.GradScaler:
    """Return a scaler that prevents underflow of gradients in fp16, and does nothing in other dtypes."""
    device, enabled = strategy.device, strategy.compute.precision == "fp16"
    if not strategy.gradients_differ:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # An overflow on one rank must skip the step on all ranks. The default argument would be the group of all
    # ranks as it was when torch's module was imported.
    scaler = ShardedGradScaler(device.type, enabled=enabled, process_group=None)
    scaler.scale(torch.zeros((), device=device))  # creates the scale, since a server has no loss
    return scaler


def parameter_count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
