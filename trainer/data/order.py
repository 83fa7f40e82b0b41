"""Orders for `data.order`: functions that choose and arrange the samples of an epoch of a map-style dataset.

An order may depend only on the dataset and on the given generator, which, like the global generators during
the call, is seeded from the seed and the epoch. So the order is the same for any number of ranks, and after a
resume, even with another global batch size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from trainer.errors import UserError

Order = Callable[[Any, Generator], Tensor]
"""Returns len(dataset) indices, int64. Samples may be omitted or repeated; each copy of a sample is read with
different random numbers."""


def shuffled(dataset: Any, generator: Generator) -> Tensor:
    """Return the dataset's `epoch_order(generator)` if it has this method, else a random permutation."""
    if (own := getattr(dataset, "epoch_order", None)) is not None:
        order: Tensor = own(generator)
        return order
    return torch.randperm(len(dataset), generator=generator)


class ByLength:
    """An order in which samples of similar length are adjacent, to reduce padding. Each sample occurs once.

    Random windows of samples are sorted by `dataset.lengths` (an integer per sample) and cut into groups,
    which are then shuffled.

    Args:
        group: number of samples of similar length; preferably train.global_batch_size, or a multiple of it.
        window: number of samples that are sorted together, rounded up to whole groups. Larger windows make
            lengths more similar, and the order less random.
    """

    def __init__(self, group: int, window: int = 4096) -> None:
        if group < 1 or window < 1:
            raise UserError(f"data.order: group={group} and window={window} must both be at least 1")
        self._group, self._window = group, -(-window // group) * group

    def __call__(self, dataset: Any, generator: Generator) -> Tensor:
        lengths = _per_sample(dataset, "lengths", torch.int64)
        windows = shuffled(dataset, generator).split(self._window)
        by_length = torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])
        groups = by_length.split(self._group)
        is_short = len(groups[-1]) < self._group  # stays last: elsewhere, it would shift later groups
        order = torch.randperm(len(groups) - is_short, generator=generator).tolist()
        return torch.cat([groups[number] for number in order] + list(groups[-1:] if is_short else ()))


class ByWeight:
    """Draws samples with replacement, with probabilities in proportion to `dataset.sample_weights`."""

    def __call__(self, dataset: Any, generator: Generator) -> Tensor:
        weights = _per_sample(dataset, "sample_weights", torch.float64)
        if not (weights >= 0).all() or not 0 < (total := weights.sum()) < torch.inf:
            raise UserError(
                f"sample_weights of {type(dataset).__name__} must be finite, at least 0, and not all 0"
            )
        drawn = torch.rand(len(weights), generator=generator, dtype=torch.float64) * total
        indices = torch.searchsorted(weights.cumsum(0), drawn, right=True)
        return indices.clamp_(max=int(weights.nonzero()[-1]))  # cumsum may round to less than the total


def _per_sample(dataset: Any, name: str, dtype: torch.dtype) -> Tensor:
    values = getattr(dataset, name, None)
    if values is None or len(values) != len(dataset):
        given = "no such attribute" if values is None else f"{len(values)} values"
        raise UserError(
            f"data.order requires the dataset to have an attribute {name} with one value for each of its "
            f"{len(dataset)} samples, but {getattr(dataset, 'class_name', type(dataset).__name__)} has "
            f"{given}"
        )
    return torch.as_tensor(values, dtype=dtype)
