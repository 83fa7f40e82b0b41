"""What every strategy offers: how a model is spread over processes and devices.

The trainer asks these questions and never which class answers. The defaults are those of a model that
lives whole on one device.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Fill = Callable[[nn.Module], None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """One whole model on one device; the others override what differs.

    Attributes:
        num_replicas: into how many parts the global batch is split.
        replica: which of the parts is this process's.
        devices: the devices that this process keeps busy.
        changes_after_first_step: whether the first backward pass changes how later ones sum gradients.
        notes: what a person should know about how the request was met.
    """

    num_replicas = 1
    replica = 0
    changes_after_first_step = False

    def __init__(self, device: torch.device, precision: str, compile_model: bool) -> None:
        self.devices = [device]
        self.precision = precision
        self.compile_model = compile_model
        self.notes: list[str] = []

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        """Return the module to call in training.

        Args:
            model: equal on every rank; on the CPU, or on the meta device.
            fill: gives `model`, or a module in it, which may be on the meta device, its values on the CPU.
        """
        fill(model)
        model = model.to(self.device)
        if self.compile_model:
            model.compile()
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module within `model`: no prefix in its parameter names, no collective."""
        return model

    def autocast(self) -> AbstractContextManager:
        """The context of the forward pass that gives `train.precision`."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def grad_scaler(self) -> torch.amp.GradScaler:
        """fp16 needs its loss scaled to keep small gradients; for others the scaler does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        """The context of one forward and backward; gradients meet across ranks only when `enabled`."""
        return nullcontext()

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm` if theirs is larger; return the norm they had (a scalar)."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, as DDP does before each forward pass (a collective).

        Running statistics follow a rank's own data; without this, ranks would evaluate and save different
        models.
        """
        if self.num_replicas > 1:
            for buffer in self.unwrap(model).buffers():
                dist.broadcast(buffer, src=0)

    def equal_ranks(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same parameters and optimizer state bit for bit, group by group."""
        return []

    def metrics(self) -> dict[str, float]:
        """What this strategy measured since the last call, for the log."""
        return {}

    def figures(self) -> dict[str, "Figure"]:
        """Pictures of what `metrics` measured last, for the log of one rank; dear, and no collective."""
        return {}

    def summary(self) -> str:
        """What a person should know at the end about the run as a whole; may be empty."""
        return ""

    def close(self) -> None:
        """Let go of threads and groups; called once, after a run that ended well."""


def parameter_count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
