"""The interface of strategies: how a model is distributed over processes and devices.

The trainer calls these methods and never checks the class. Defaults: a whole model on one device.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.comm.timeline import Timeline
from trainer.distributed.backend_flags import DTYPES
from trainer.distributed.collectives import broadcast_buffers
from trainer.errors import UserError
from trainer.exact.order import AS_THEY_COME, SumOrder
from trainer.optim.train_state import TrainState
from trainer.strategies.shardable import devices_of, refuse_shared_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainer.optim.trained import Trained

Fill = Callable[[nn.Module], None]
"""Gives a module that may be on the meta device its initial values, on the CPU (a collective)."""
_STEPS_WATCHING_ALL, _NUM_WATCHED = 3, 8


@dataclass(frozen=True)
class Computing:
    """How a model is computed under any strategy: settings of `train`, by the same names."""

    precision: str = "fp32"
    compile: bool = False
    compile_mode: str = "default"  # torch.compile's
    channels_last: bool = False  # weights of four dimensions have the memory format of images


class Strategy:
    """One whole model on one device; the others override what differs.

    Attributes:
        num_replicas: how many processes share the global batch.
        replica: the index of this process's share; from `num_replicas` on, it has none.
        devices: the devices that this process uses; batches go to the first.
        gradients_differ: whether ranks update different parameters, or different parts of them.
        algorithm: the choice of `comm` in force; known after `wrap`.
        notes: messages for the user about how the settings were applied.
        order: in which order micro-batches are added, set before `wrap`.
        not_whole: why this process alone cannot save the run, in a phrase; None if it holds all.
        fills_by_unit: whether `wrap` fills the model one unit after another, and shards each.
        no_gradients_hint: why a backward pass may have given none, and the way out.
    """

    num_replicas = 1
    replica = 0
    algorithm = "native"
    no_gradients_hint = (
        "The loss depends on none of them, as behind detach(), item() or NumPy: return one that is computed "
        "from the model's outputs by differentiable operations"
    )
    not_whole: str | None = None
    gradients_differ = False
    fills_by_unit = False
    order: SumOrder = AS_THEY_COME

    def __init__(self, device: torch.device, computing: Computing) -> None:
        self.devices = [device]
        self.computing = computing
        self.notes: list[str] = []
        self._watchable: list[Tensor] = []  # as of the last step in which all were watched
        self.timeline: Timeline | None = None  # of the all-reduces of its backward passes, if they are timed

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        """Return the module to call in training.

        Args:
            model: equal on every rank; on the CPU, or on the meta device.
            fill: called with `model`, or modules in it, the same ones in the same order on every rank.
        """
        fill(model)
        model = self.move_to_devices(model)
        self.order.attach(model)
        if self.computing.compile:
            model.compile(mode=self.computing.compile_mode)
        return model

    def move_to_devices(self, model: nn.Module) -> nn.Module:
        """Move a whole model to where this process computes; one that is on several devices stays there.

        Such a model moves its own activations, and returns its output to the first of them.
        """
        if self.computing.channels_last:
            lay_out_channels_last(model)
        placed = devices_of(model)
        if len(placed) > 1:
            self.devices = placed
            self.notes.append(f"the model has placed itself on {', '.join(map(str, placed))}")
            return model
        if self.device.type != "cpu":
            refuse_shared_memory(model, str(self.device))
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module within `model`: no prefix in its parameter names, no collective."""
        return model

    def prepare(self, state: TrainState) -> None:
        """Called before the first step, with the complete state that training changes."""

    def autocast(self) -> AbstractContextManager:
        """The context of the forward pass that gives `train.precision`."""
        if self.computing.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.computing.precision])

    def grad_scaler(self) -> torch.amp.GradScaler:
        """fp16 needs a scaled loss to keep small gradients; otherwise the scaler does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.computing.precision == "fp16")

    def begin_step(self) -> None:
        """Called when a step begins: next come the gradients of this process."""
        self.order.begin_step()

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        """The context of one forward and backward; gradients are reduced across ranks only if `enabled`."""
        return self.order.leaf(enabled)

    def aggregate(self, model: nn.Module) -> None:
        """Wait until the parameters that this process updates hold the mean of all replicas' gradients."""
        self.order.finish()

    def trained(self, model: nn.Module) -> list[Tensor]:
        """The tensors in which backward passes add gradients."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def watched(self, model: nn.Module, steps_made: int) -> list[Tensor]:
        """Those of `trained` whose gradients are compared before and after a loss, which may not change them.

        All in the first steps, then others in each step, 8 at most: to look at 10,000 takes 70 ms of the
        host, and a loss rarely changes one alone.

        Args:
            steps_made: since the run began or was resumed.
        """
        if steps_made < _STEPS_WATCHING_ALL:
            self._watchable = self.trained(model)
        if steps_made < _STEPS_WATCHING_ALL or len(self._watchable) <= _NUM_WATCHED:
            return self._watchable
        first = _NUM_WATCHED * steps_made % len(self._watchable)
        return self._watchable[first : first + _NUM_WATCHED]

    def refuse_no_gradients(self, model: nn.Module) -> None:
        """Raise UserError if no parameter has a gradient; called after the first step's backward passes."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if trained and not any(self._has_gradient(parameter) for parameter in trained):
            raise UserError(f"the first backward pass gave no parameter a gradient. {self.no_gradients_hint}")

    def _has_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None

    def grad_norm(self, trained: "Trained") -> Tensor:
        """The norm of all gradients, a scalar, the same on every rank (a collective)."""
        return self.order.norm(trained)

    def is_to_blame(self) -> bool:
        """Whether this rank is known to have made the gradient that is not finite; called if there is one."""
        return self.num_replicas == 1

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, as DDP does before each forward pass (a collective).

        Running statistics follow a rank's own data; without this, ranks would evaluate different models.
        """
        if self.num_replicas > 1:
            broadcast_buffers(self.unwrap(model), src=0)

    def update(self, state: TrainState, finite: bool = True) -> None:
        """Update the parameters that this process owns from their gradients, which are then dropped.

        Without `finite` they are only dropped, and the schedule moves.
        """
        state.update(finite)
        state.trained.drop_gradients()

    def finish_checks(self) -> None:
        """Look for what no checkpoint would hold, and finish the checks of the last step (a collective).

        Called before and after an evaluation, before a save and at the end of the run.

        Raises:
            UserError: on every rank alike: one of them failed.
        """

    def gathered(self, state: TrainState) -> AbstractContextManager:
        """The context of a save: rank 0 has the state that only other ranks had (a collective)."""
        return nullcontext()

    def weights_changed(self, model: nn.Module) -> None:
        """Called when the values of parameters were changed other than by a step (a collective)."""

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Groups of ranks that hold the same bits of what `replicated` yields; [] if there are none."""
        return []

    def replicated(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """The live tensors that replicas share, by name."""
        return state.replicated()

    def metrics(self) -> dict[str, float]:
        """The measurements of this strategy since the last call, for the log."""
        return self.timeline.metrics() if self.timeline is not None else {}

    def plots(self) -> dict[str, "Figure"]:
        """Plots of the last `metrics`, for the log of one rank; slow, and not a collective."""
        if self.timeline is None:
            return {}
        return {"comm/buckets": self.timeline.draw()}

    def summary(self) -> str:
        """A summary of the whole run for the user, at the end; may be empty."""
        return self.timeline.summary() if self.timeline is not None else ""

    def measured(self) -> dict[str, Any]:
        """This strategy's communication, for result.json: on rank 0 (a collective)."""
        return {}

    def close(self) -> None:
        """End threads and groups; called once, after a successful run."""


def lay_out_channels_last(model: nn.Module) -> None:
    """Convert the weights of convolutions once, or each convolution would do so at each call."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def parameter_count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
