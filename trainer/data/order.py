"""Orders of an epoch, for `data.order`: which samples of data read by index are trained on, and when.

An order follows from the dataset and a generator seeded with (seed, epoch) alone, as are the global ones
meanwhile. So it is the same for any number of ranks and after a resume, also with another global batch size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from trainer.errors import UserError

Order = Callable[[Any, Generator], Tensor]
"""Returns len(dataset) indices (int64), of which some may be missing and others repeated. Each copy of a
sample in an epoch is read with different random numbers."""


def shuffled(dataset: Any, generator: Generator) -> Tensor:
    """The dataset's own `epoch_order(generator)` if it has one, else each sample once."""
    if (own := getattr(dataset, "epoch_order", None)) is not None:
        order: Tensor = own(generator)
        return order
    return torch.randperm(len(dataset), generator=generator)


class ByLength:
    """Each sample once, with samples of similar length next to each other, so that Padding adds little.

    Windows of samples drawn at random are sorted by `dataset.lengths` (an integer for each sample) and cut
    into groups, which come in a random order.

    Args:
        group: samples of similar length; best is train.global_batch_size, or a multiple of it.
        window: samples that are sorted together, rounded up to whole groups: more of them have more similar
            lengths, and are less random.
    """

    def __init__(self, group: int, window: int = 4096) -> None:
        if group < 1 or window < 1:
            raise UserError(f"data.order: group is {group} and window {window}, but both must be at least 1")
        self._group, self._window = group, -(-window // group) * group

    def __call__(self, dataset: Any, generator: Generator) -> Tensor:
        lengths = _per_sample(dataset, "lengths", torch.int64)
        windows = shuffled(dataset, generator).split(self._window)
        by_length = torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])
        groups = by_length.split(self._group)
        is_short = len(groups[-1]) < self._group  # it stays last, or it would shift the groups after it
        order = torch.randperm(len(groups) - is_short, generator=generator).tolist()
        return torch.cat([groups[number] for number in order] + list(groups[-1:] if is_short else ()))


class ByWeight:
    """Draws each sample with a probability in proportion to its weight, with replacement.

    The weights are `dataset.sample_weights`, at least 0 each.
    """

    def __call__(self, dataset: Any, generator: Generator) -> Tensor:
        weights = _per_sample(dataset, "sample_weights", torch.float64)
        if not (weights >= 0).all() or not 0 < (total := weights.sum()) < torch.inf:
            raise UserError(
                f"sample_weights of {type(dataset).__name__} must be finite, at least 0, and not all 0"
            )
        drawn = torch.rand(len(weights), generator=generator, dtype=torch.float64) * total
        found = torch.searchsorted(weights.cumsum(0), drawn, right=True)
        return found.clamp_(max=int(weights.nonzero()[-1]))  # the sum may be rounded to less than the total


def _per_sample(dataset: Any, name: str, dtype: torch.dtype) -> Tensor:
    values = getattr(dataset, name, None)
    if values is None or len(values) != len(dataset):
        has = "has none" if values is None else f"has {len(values)}"
        raise UserError(
            f"data.order needs {name} of the dataset, one for each of its {len(dataset)} samples, but "
            f"{getattr(dataset, 'class_name', type(dataset).__name__)} {has}"
        )
    return torch.as_tensor(values, dtype=dtype)
