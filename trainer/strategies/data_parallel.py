"""torch.nn.DataParallel: one process uses all GPUs of its host."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.strategies.base import ComputeOptions, Fill, Strategy
from trainer.strategies.placement import refuse_several_devices


class DataParallel(Strategy):
    """Scatters each batch over the GPUs, copies the model to them, and gathers the outputs on GPU 0."""

    name = "dp"

    def __init__(self, device: torch.device, compute: ComputeOptions) -> None:
        super().__init__(device, compute)
        if is_accelerator(device):
            kind, count = accelerator.found(device.type)
            self.devices = [torch.device(kind, index) for index in range(count)]
        if len(self.devices) > 1:
            self.notes.append(
                f"dp: {self.devices[0]} gathers all outputs, which takes additional memory, and copies the "
                f"model to the other {len(self.devices) - 1} GPUs in every step; strategy=ddp avoids both"
            )
        else:
            self.notes.append(f"dp: nn.DataParallel needs at least two GPUs; this run uses only {device}")

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        refuse_several_devices(model, "strategy=dp")
        if len(self.devices) == 1:
            return super().wrap(model, fill)
        fill(model)
        return nn.DataParallel(GpuReplica(self._place(model), self.autocast), device_ids=self.devices)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module.module if isinstance(model, nn.DataParallel) else model


class GpuReplica(nn.Module):
    """The module that DataParallel copies to each GPU and calls there in a thread.

    The module enters autocast again, because DataParallel's threads use the default dtype, fp16, even if the
    run uses bf16.
    """

    def __init__(self, module: nn.Module, autocast: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.module, self._autocast = module, autocast

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self._autocast():
            return self.module(*inputs, **named)
