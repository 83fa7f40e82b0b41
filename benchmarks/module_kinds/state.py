"""Modules whose forward passes change state: buffers, counters, statistics, hidden states."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.module_kinds.base import Kind


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
    """Continues from the hidden state of the previous batch."""

    state: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        out, state = self.cell(x[None], self.state)
        self.state = state.detach() if self.training else self.state
        return out[0]


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
    """Does not update its running statistics."""

    def make(self) -> None:
        self.layer = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        super().train(mode)
        self.layer.eval()
        return self


class RenamesItsState(Kind):
    def make(self) -> None:
        super().make()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}inner.weight"] = state.pop(f"{prefix}layer.weight")


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}layer.weight"] = state.pop(f"{prefix}inner.weight")


class Teacher(Kind):
    """Updates a moving average of its layer in the forward pass."""

    def make(self) -> None:
        super().make()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) - self.teacher(x)
