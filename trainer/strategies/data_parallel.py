"""torch.nn.DataParallel: one process drives all GPUs of its host."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.errors import UserError
from trainer.nested import leaves
from trainer.strategies.base import Computing, Fill, Strategy
from trainer.strategies.placement import refuse_several_devices
from trainer.strategies.shardable import refuse_max_norm


class DataParallel(Strategy):
    """Scatter each batch over the GPUs, replicate the model at every step, gather the outputs on GPU 0."""

    name = "dp"

    def __init__(self, device: torch.device, computing: Computing) -> None:
        super().__init__(device, computing)
        if is_accelerator(device):
            kind, count = accelerator.found(device.type)
            self.devices = [torch.device(kind, index) for index in range(count)]
        if len(self.devices) > 1:
            self.notes.append(
                f"dp: outputs are gathered on {self.devices[0]}, which needs more memory than the other "
                f"{len(self.devices) - 1}, and the model is copied to them at every step; ddp does neither"
            )
        else:
            self.notes.append(f"dp: nn.DataParallel needs two GPUs; this run is one model on {device}")

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        refuse_several_devices(model, "strategy=dp")
        if len(self.devices) == 1:
            return super().wrap(model, fill)
        refuse_max_norm(model, "strategy=dp")
        fill(model)
        call = torch.compile(_call, mode=self.computing.compile_mode) if self.computing.compile else _call
        replica = GpuReplica(self._placed(model), self.autocast, call)
        return nn.DataParallel(replica, device_ids=self.devices)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module.module if isinstance(model, nn.DataParallel) else model


class GpuReplica(nn.Module):
    """The module that DataParallel copies to each GPU and calls there, in its own thread.

    In such a thread autocast is on, but in its default dtype: fp16 even if the run asks for bf16. So it is
    entered again. A copy of a compiled module would call the original, on GPU 0; so a function of the copy is
    compiled instead.
    """

    def __init__(
        self,
        module: nn.Module,
        autocast: Callable[[], AbstractContextManager],
        call: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.module, self._autocast = module, autocast
        self._call = call
        self._compiling, self._seen = None if call is _call else threading.Lock(), set[Any]()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._compiling is None or (key := _kind(inputs)) in self._seen:
            with self._autocast():
                return to_gather(self._call(self.module, *inputs, **named))
        with self._compiling, self._autocast():  # torch cannot trace in two threads at a time
            output = self._call(self.module, *inputs, **named)
        self._seen.add(key)
        return to_gather(output)


def to_gather(output: Any) -> Any:
    """`output` itself, whose samples nn.DataParallel gathers from all GPUs.

    Raises:
        UserError: something in it has no samples, such as a loss.
    """
    for value in leaves(output):
        if value is not None and not (isinstance(value, Tensor) and value.ndim):
            what = "a tensor without dimensions" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"strategy=dp: the model returns {what}, such as its own loss, but nn.DataParallel gathers "
                "only samples; use strategy=ddp"
            )
    return output


def _call(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    return module(*inputs, **named)


def _kind(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The properties of inputs that need a new compiled graph."""
    return (
        torch.is_grad_enabled(),
        *((value.device, value.shape) for value in inputs if isinstance(value, Tensor)),
    )
