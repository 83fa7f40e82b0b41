"""A moving average of the weights: kept during training, and put in their place for evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.tensors.local_shard import to_local


class MovingAverage:
    """An exponential moving average of what training changes in a model, on the device of each tensor.

    Sharded parameters have sharded averages. Buffers are averaged too, because running statistics belong to
    the weights with which they were computed. Costs the memory of the weights once more, and a pass over both
    for each step.

        average(0) = weights(0)        average(t) = d average(t - 1) + (1 - d) weights(t)

    Args:
        parameters: by their names in a checkpoint; a tied one under each of its names.
        buffers: the module and the attribute of each, since a module may replace the tensor.
        decay: d, from 0 to below 1.
        warmup: d is at most (1 + t) / (10 + t), so that the first weights are soon forgotten.
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
        """Also average these parameters; as they have not changed so far, their average is their value."""
        copies = {weight: weight.detach().clone() for weight in parameters.values()}
        self._parameters = {**self._parameters, **parameters}
        self._averages |= {name: copies[weight] for name, weight in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average."""
        self._num_updates += 1
        begin = (1 + self._num_updates) / (10 + self._num_updates)
        decay = min(self._decay, begin) if self._warmup else self._decay
        pairs = self._pairs()
        get_ema_multi_avg_fn(decay)([average for average, _ in pairs], [weight for _, weight in pairs], None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model's weights are the averages; afterwards they are restored to the bit.

        The averages hold the weights meanwhile: this takes the memory of the largest tensor, not of all.
        """
        pairs = self._pairs()
        _exchange(pairs)
        try:
            yield
        finally:
            _exchange(pairs[::-1])  # backwards, since tensors may share memory

    def restart(self) -> None:
        """Restart from the present weights."""
        self._num_updates = 0
        with torch.no_grad():
            for average, weight in self._pairs():
                average.copy_(weight)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The averages of parameters, live."""
        return ((name, self._averages[name]) for name in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, not copied."""
        return {"num_updates": self._num_updates, "weights": dict(self._averages)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Tensors must be sharded as they are here."""
        self._num_updates = saved["num_updates"]
        with torch.no_grad():
            for name, value in saved["weights"].items():
                self._averages[name].copy_(value)

    def _weights(self) -> dict[str, Tensor]:
        buffers = {name: getattr(module, attribute) for name, (module, attribute) in self._buffers.items()}
        return {**self._parameters, **buffers}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of an average and its tensor, each once; of sharded ones this rank's shard."""
        weights = self._weights()
        distinct = {average: weights[name] for name, average in self._averages.items()}
        return [(to_local(average), to_local(weight)) for average, weight in distinct.items()]


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for average, weight in pairs:
        held = weight.clone()
        weight.copy_(average)
        average.copy_(held)
