"""An exponential moving average of the weights, updated during training and used for evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.tensors.local_shard import to_local


class MovingAverage:
    """An exponential moving average (EMA) of a model's parameters and buffers.

    Each average is on the device of its tensor, and sharded like that tensor. Buffers are averaged too,
    because running statistics belong to the weights with which they were computed.

        average(0) = weights(0)        average(t) = d average(t - 1) + (1 - d) weights(t)

    Args:
        parameters: by their names in a checkpoint; tied parameters under each of their names.
        buffers: the module and attribute of each buffer, because a module may replace the tensor.
        decay: the factor d, with 0 <= d < 1.
        warmup: limit d to (1 + t) / (10 + t), so that the initial weights soon lose their influence.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, tuple[nn.Module, str]],
        decay: float,
        warmup: bool,
    ) -> None:
        self._parameters, self._buffers, self._decay, self._warmup = parameters, buffers, decay, warmup
        weights = self._weights()
        copies = {weight: weight.detach().clone() for weight in weights.values()}
        self._averages = {name: copies[weight] for name, weight in weights.items()}
        self._num_updates = 0

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Also average these parameters, starting from their current values."""
        copies = {weight: weight.detach().clone() for weight in parameters.values()}
        self._parameters = {**self._parameters, **parameters}
        self._averages |= {name: copies[weight] for name, weight in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        self._num_updates += 1
        limit = (1 + self._num_updates) / (10 + self._num_updates)
        decay = min(self._decay, limit) if self._warmup else self._decay
        pairs = self._pairs()
        get_ema_multi_avg_fn(decay)([average for average, _ in pairs], [weight for _, weight in pairs], None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the model; on exit, restore the weights bit for bit.

        Weights and averages are swapped, which needs extra memory only for the largest tensor.
        """
        pairs = self._pairs()
        _exchange(pairs)
        try:
            yield
        finally:
            _exchange(pairs[::-1])  # in reverse order, because tensors may share memory

    def restart(self) -> None:
        self._num_updates = 0
        with torch.no_grad():
            for average, weight in self._pairs():
                average.copy_(weight)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the live averages of parameters, by name."""
        return ((name, self._averages[name]) for name in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the live averages, which are not copied."""
        return {"num_updates": self._num_updates, "weights": dict(self._averages)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load saved averages, which must be sharded like the current ones."""
        self._num_updates = saved["num_updates"]
        with torch.no_grad():
            for name, value in saved["weights"].items():
                self._averages[name].copy_(value)

    def _weights(self) -> dict[str, Tensor]:
        buffers = {name: getattr(module, attribute) for name, (module, attribute) in self._buffers.items()}
        return {**self._parameters, **buffers}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        weights = self._weights()
        distinct = {average: weights[name] for name, average in self._averages.items()}
        return [(to_local(average), to_local(weight)) for average, weight in distinct.items()]


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for average, weight in pairs:
        copy = weight.clone()
        weight.copy_(average)
        average.copy_(copy)
