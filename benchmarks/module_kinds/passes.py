"""Modules with unusual passes: control flow, hooks, random numbers, recomputation, return types."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.module_kinds.base import Kind


class Unused(Kind):
    def make(self) -> None:
        super().make()
        self.unused = nn.Linear(8, 8)


class EverySecondPass(Kind):
    def make(self) -> None:
        super().make()
        self.other = nn.Linear(8, 8)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.layer(x) if self.passes % 2 else self.other(x)


class RoutedByData(Kind):
    def make(self) -> None:
        super().make()
        self.other = nn.Linear(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x) if x[0, 0] > 0 else self.other(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradients[0]


class OwnFunction(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return _Cube.apply(self.layer(x))


class ModuleHooks(Kind):
    def make(self) -> None:
        super().make()
        self.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        self.layer.register_forward_hook(lambda module, inputs, output: output + 1)
        self.layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


class GradientHook(Kind):
    def make(self) -> None:
        super().make()
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)


class AccumulateHook(Kind):
    def make(self) -> None:
        super().make()
        self.layer.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


class Noise(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x)) if self.training else self.layer(x)


class NoiseOfOthers(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + random.random() + float(np.random.rand())) if self.training else x


class Dropout(Kind):
    def make(self) -> None:
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))


class Checkpointed(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class CheckpointedReentrant(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


class Attention(Kind):
    def make(self) -> None:
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


class GradientInForward(Kind):
    """Computes a gradient in its forward pass, so that training needs second derivatives."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.layer(x)).square().sum()
            return x - torch.autograd.grad(energy, x, create_graph=self.training)[0]


class ThawsLater(Kind):
    def make(self) -> None:
        self.layer = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("passes", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == 2:
            self.layer.requires_grad_(True)
        return self.layer(x)


class BuildsInForward(Kind):
    def make(self) -> None: ...

    def middle(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(8, 8)
        return self.layer(x)


class Scripted(Kind):
    def make(self) -> None:
        self.layer = torch.jit.script(nn.Linear(8, 8))


class ReturnsObject(Kind):
    def forward(self, rows: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(rows))


class ReturnsDict(Kind):
    def forward(self, rows: Tensor) -> Any:
        return {"logits": super().forward(rows)}


class ReturnsTuple(Kind):
    def forward(self, rows: Tensor) -> Any:
        return super().forward(rows), rows
