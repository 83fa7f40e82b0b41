"""A model that computes nothing and only waits, as a CPU waits for an accelerator."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Wait(torch.autograd.Function):
    """Sleeps for `seconds` in the forward pass, and for twice that time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Waiting(nn.Module):
    """A model of `layers` layers that wait `forward_ms` each, with `megabytes` (10^6 bytes) in total."""

    def __init__(self, num_classes: int, layers: int, megabytes: float, forward_ms: float) -> None:
        super().__init__()
        self._seconds = forward_ms / 1e3
        numel = round(megabytes * 1e6 / 4 / layers)
        self.layers = nn.ParameterList(torch.zeros(numel) for _ in range(layers))
        self._num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) to (batch, classes)."""
        out = x.new_zeros(len(x), self._num_classes)
        for weights in self.layers:
            out = _Wait.apply(out + weights[: self._num_classes], self._seconds)
        return out
