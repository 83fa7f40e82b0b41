"""Modules whose parameters are shared, frozen, computed, in lists, or of unusual shapes and dtypes."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from benchmarks.module_kinds.base import KINDS, Kind


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


class InList(Kind):
    """Has parameters that are not registered with a module."""

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


class Copies(Kind):
    def make(self) -> None:
        layer = nn.Linear(8, 8)
        self.layer = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(layer))
