"""Statistics of a step: the size of the update, and histograms of weights and gradients."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.accelerator import double, for_sums
from trainer.distributed.collectives import sum_over_ranks
from trainer.distributed.ranks import Ranks
from trainer.model.plain_names import parameter_names
from trainer.tensors.local_shard import to_local

_SAMPLES = 4096  # elements of a tensor, so that the copy of the weights is small
_BINS = 64

Histogram = tuple[Tensor, Tensor]
"""The number of values between consecutive edges: (bins,) and (bins + 1,), float64 on the CPU."""


class WeightStatistics:
    """Sizes of updates, and histograms, of a model, possibly sharded. Every rank makes the same calls."""

    def __init__(self, model: nn.Module, ranks: Ranks, histograms_every: int | None) -> None:
        self._model, self._ranks, self._every = model, ranks, histograms_every
        self._moved = torch.zeros(2, dtype=torch.float64)
        self.histograms: dict[str, Histogram] = {}

    @contextmanager
    def around_update(self, step: int, examines: bool) -> Iterator[None]:
        """Examine the update within the context; gradients must be unscaled (a collective if `examines`)."""
        if not examines:
            yield
            return
        before, self.histograms = self._weights(), {}
        if self._every is not None and step % self._every == 0:
            named = list(parameter_names(self._model))
            self.histograms = histograms(
                [
                    *((f"weights/{name}", parameter) for name, parameter in named),
                    *((f"gradients/{name}", parameter.grad) for name, parameter in named),
                ],
                self._ranks.device,
            )
        yield
        norms = [torch.linalg.vector_norm(part) for part in (self._weights() - before, before)]
        self._moved = double(torch.stack(norms)).square()

    def update_to_weight(self) -> float:
        """Return the ratio of update norm to weight norm, estimated from sampled elements (a collective)."""
        moved, weights = sum_over_ranks(self._moved.to(for_sums(self._ranks.device))).tolist()
        return math.sqrt(moved / weights) if weights else 0.0

    @torch.no_grad()
    def _weights(self) -> Tensor:
        """Return a copy of this rank's trainable weights, with scaled samples of large tensors."""
        parts = [torch.empty(0, device=self._ranks.device)]
        trained = (p for p in self._model.parameters() if p.requires_grad and p.is_floating_point())
        for parameter in trained:
            flat = to_local(parameter).reshape(-1)
            stride = math.ceil(flat.numel() / _SAMPLES) | 1  # odd, or it may stay in one column of a matrix
            sample = flat[::stride].to(self._ranks.device, torch.float32)
            parts.append(sample * math.sqrt(flat.numel() / len(sample)) if stride > 1 else sample)
        return torch.cat(parts)


@torch.no_grad()
def histograms(named: Iterable[tuple[str, Tensor | None]], device: torch.device) -> dict[str, Histogram]:
    """Return histograms of the finite values of each tensor; replicated values count once (a collective)."""
    device = for_sums(device)
    names, parts, counted, sizes = [], [], [], []
    for name, tensor in named:
        values = torch.empty(0) if tensor is None else to_local(tensor).flatten().float()
        names.append(name)
        parts.append(values[values.isfinite()].to(device))
        counted.append(values.numel())
        sizes.append(0 if tensor is None else tensor.numel())
    none = torch.full((1,), math.inf, device=device)
    ends = torch.stack(
        [torch.stack([torch.cat([p, none]).min(), torch.cat([-p, none]).min()]) for p in parts]
    )
    dist.all_reduce(ends, dist.ReduceOp.MIN)
    lows, highs = ends[:, 0].tolist(), (-ends[:, 1]).tolist()
    counts = torch.zeros(len(names), _BINS + 1, dtype=torch.float64, device=device)
    edges: list[Tensor] = []
    for index, (values, low, high) in enumerate(zip(parts, lows, highs, strict=True)):
        if low > high:  # no rank has a value
            low = high = 0.0
        margin = max(abs(low), abs(high), 1e-12) * 1e-3 if high - low <= 1e-6 * abs(high) else 0.0
        edges.append(torch.linspace(low - margin, high + margin, _BINS + 1, dtype=torch.float64))
        # torch.histc raises an error on CUDA with train.exact.
        bins = (values - (low - margin)) * (_BINS / (high - low + 2 * margin))
        counts[index].index_add_(0, bins.clamp_(0, _BINS - 1).long(), torch.ones_like(values).double())
        counts[index, _BINS] = counted[index]
    counts, whole = sum_over_ranks(counts).cpu(), torch.tensor(sizes, dtype=torch.float64, device=device)
    dist.all_reduce(whole, dist.ReduceOp.MAX)  # only one rank may have a tensor
    share = whole.cpu() / counts[:, _BINS].clamp(min=1)
    return {name: (counts[index, :_BINS] * share[index], edges[index]) for index, name in enumerate(names)}
