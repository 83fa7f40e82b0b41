"""Modules as people write them, for benchmarks/modules.py: rows (B, 6) in, two classes out, a habit each."""

import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

KINDS: dict[str, Callable[[], nn.Module]] = {}


class Kind(nn.Module):
    """Two layers, and between them what a habit does with hidden (B, 8)."""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.make()

    def make(self) -> None:
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Any:
        return self.last(self.middle(torch.tanh(self.first(rows))))

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Plain(Kind):
    pass


class Tied(Kind):
    def make(self) -> None:
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def middle(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class TiedTransposed(Kind):
    def middle(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight.t())


class TwoOnOneStorage(Tied):
    def make(self) -> None:
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight.data = self.one.weight.data


class SharedModule(Kind):
    def make(self) -> None:
        shared = nn.Linear(8, 8)
        self.one, self.two = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared)

    def middle(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Frozen(Kind):
    def make(self) -> None:
        self.layer = nn.Linear(8, 8).requires_grad_(False)


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


class LateBuffer(Kind):
    def middle(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(8))
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return self.layer(x - self.mean)


class AssignedBuffer(Kind):
    def make(self) -> None:
        super().make()
        self.register_buffer("mean", torch.zeros(8))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


class BufferSetFromNone(AssignedBuffer):
    def make(self) -> None:
        Kind.make(self)
        self.register_buffer("mean", None)

    def middle(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().middle(x)


class GrowingBuffer(Kind):
    def make(self) -> None:
        super().make()
        self.register_buffer("seen", torch.zeros(1, 8))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach()[:1]])
        return self.layer(x - self.seen.mean(0))


class UnsavedBuffer(Kind):
    def make(self) -> None:
        super().make()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return self.layer(x - self.mean)


class TensorAttribute(UnsavedBuffer):
    def make(self) -> None:
        Kind.make(self)
        self.mean = torch.zeros(8)


class CountsInNumber(Kind):
    passes = 0

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.layer(x) / (1 + self.passes)


class CountsInBuffer(Kind):
    def make(self) -> None:
        super().make()
        self.register_buffer("passes", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.layer(x) / (1 + self.passes)


class ExtraInt(CountsInNumber):
    def get_extra_state(self) -> Any:
        return self.passes

    def set_extra_state(self, state: Any) -> None:
        self.passes = state


class ExtraDict(CountsInNumber):
    def get_extra_state(self) -> Any:
        return {"passes": self.passes, "name": "mine"}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


class ExtraBytes(CountsInNumber):
    def get_extra_state(self) -> Any:
        return self.passes.to_bytes(8, "big")

    def set_extra_state(self, state: Any) -> None:
        self.passes = int.from_bytes(state, "big")


class ExtraTensor(CountsInNumber):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Any) -> None:
        self.passes = int(state)


class Lazy(Kind):
    def make(self) -> None:
        self.layer = nn.LazyLinear(8)


class Complex(Kind):
    def make(self) -> None:
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def middle(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class WeightNorm(Kind):
    def make(self) -> None:
        self.layer = parametrizations.weight_norm(nn.Linear(8, 8))


class OldWeightNorm(Kind):
    def make(self) -> None:
        self.layer = nn.utils.weight_norm(nn.Linear(8, 8))


class SpectralNorm(Kind):
    def make(self) -> None:
        self.layer = parametrizations.spectral_norm(nn.Linear(8, 8))


class OldSpectralNorm(Kind):
    def make(self) -> None:
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Parametrized(Kind):
    def make(self) -> None:
        self.layer = nn.Linear(8, 8)
        parametrize.register_parametrization(self.layer, "weight", _Symmetric())


class SparseEmbedding(Kind):
    def make(self) -> None:
        self.table = nn.Embedding(4, 8, sparse=True)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long())


class MaxNorm(Kind):
    def make(self) -> None:
        self.table = nn.Embedding(4, 8, max_norm=0.5)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long())


class Rnn(Kind):
    def make(self) -> None:
        self.cell: nn.RNNBase = nn.RNN(8, 8, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None])[0][:, 0]


class Lstm(Rnn):
    def make(self) -> None:
        self.cell = nn.LSTM(8, 8, 2, batch_first=True)


class Gru(Rnn):
    def make(self) -> None:
        self.cell = nn.GRU(8, 8, batch_first=True, bidirectional=False)


class StatefulRnn(Rnn):
    """Continues from the hidden state of the batch before."""

    state: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        out, state = self.cell(x[None], self.state)
        self.state = state.detach() if self.training else self.state
        return out[0]


class InList(Kind):
    """No module lists its parameters."""

    def make(self) -> None:
        self.layers = [nn.Linear(8, 8)]

    def middle(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class InDicts(Kind):
    def make(self) -> None:
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.scales = nn.ParameterDict({"b": nn.Parameter(torch.ones(8))})

    def middle(self, x: Tensor) -> Tensor:
        return self.layers["a"](x) * self.scales["b"]


class InClosure(Kind):
    def make(self) -> None:
        self.layer = layer = nn.Linear(8, 8)
        self.call = lambda x: layer(x)
        self.half = functools.partial(torch.mul, torch.full((8,), 0.5))

    def middle(self, x: Tensor) -> Tensor:
        return self.half(self.call(x))


class KeptParameters(Kind):
    def make(self) -> None:
        super().make()
        self.kept = [self.layer.weight]

    def middle(self, x: Tensor) -> Tensor:
        return x @ self.kept[0]


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


class _Weighted(Kind):
    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def middle(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)


KINDS.pop("_Weighted")


class NotContiguous(_Weighted):
    def make(self) -> None:
        self.weight = nn.Parameter(torch.randn(8, 8).t())


class ZeroDimensional(Kind):
    def make(self) -> None:
        super().make()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class EmptyParameter(Kind):
    def make(self) -> None:
        super().make()
        self.nothing = nn.Parameter(torch.empty(0, 8))

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, F.linear(x, self.nothing)], 1))


class IntParameter(Kind):
    def make(self) -> None:
        super().make()
        self.order = nn.Parameter(torch.randperm(8), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x[:, self.order])


class HalfParameter(_Weighted):
    def make(self) -> None:
        self.weight = nn.Parameter(torch.randn(8, 8).bfloat16())


class Double(Kind):
    def make(self) -> None:
        super().make()
        self.double()

    def forward(self, rows: Tensor) -> Any:
        return super().forward(rows.double())


class BatchNorm(Kind):
    def make(self) -> None:
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


class BatchNormOfAll(Kind):
    def make(self) -> None:
        self.layer = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, affine=False))


class BatchNormUntracked(Kind):
    def make(self) -> None:
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False))


class FrozenBatchNorm(Kind):
    """Its statistics are kept as they are."""

    def make(self) -> None:
        self.layer = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        super().train(mode)
        self.layer.eval()
        return self


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


class RenamesItsState(Kind):
    def make(self) -> None:
        super().make()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}inner.weight"] = state.pop(f"{prefix}layer.weight")


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}layer.weight"] = state.pop(f"{prefix}inner.weight")


class Copies(Kind):
    def make(self) -> None:
        layer = nn.Linear(8, 8)
        self.layer = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(layer))


class Teacher(Kind):
    """Follows the first layer slowly, in the forward pass."""

    def make(self) -> None:
        super().make()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) - self.teacher(x)


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
    """Computes a gradient in its forward pass, so training needs a second derivative."""

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


def build(kind: str) -> nn.Module:
    return KINDS[kind]()
