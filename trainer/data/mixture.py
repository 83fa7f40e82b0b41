"""Several datasets as one, in given proportions."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from trainer.data.images import check_at_least_one
from trainer.data.loading.reader import sample_of
from trainer.data.stream import is_stream
from trainer.errors import UserError


class Mixture(Dataset[Any]):
    """Several datasets that are read by index as one, each with its share of every epoch.

    An epoch of training has `num_samples` samples, of which each dataset gives as many as its weight says, to
    the nearest sample. A dataset that gives more than it has is gone through several times, with other
    augmentation. Of one that gives fewer, another part is drawn in each epoch. Held-out data is all of each,
    one after the other.

    Attributes that all datasets have, with equal values, are those of the mixture, such as num_classes.

    Args:
        split: train or eval, which `datasets` are called with.
        datasets: in the config, nodes with `_partial_: true`.
        weights: None: in proportion to the numbers of their samples.
        num_samples: None: as many as all datasets have.

    Raises:
        UserError: a stream, another mixture, an empty dataset, or weights that are not proportions.
    """

    def __init__(
        self,
        split: str,
        datasets: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
    ) -> None:
        if not isinstance(datasets, Sequence) or not datasets:
            raise UserError("data.dataset.datasets must be a list of datasets, each with _partial_: true")
        check_at_least_one(num_samples=num_samples)
        self.datasets = [make(split=split) for make in datasets]
        for number, dataset in enumerate(self.datasets):
            name = f"data.dataset.datasets[{number}] is a {type(dataset).__name__}"
            if is_stream(dataset):
                raise UserError(
                    f"{name}, which is only read forward, but a mixture is of data read by index; have one "
                    "stream read the others, as interleave_datasets of Hugging Face's datasets does"
                )
            if hasattr(dataset, "epoch_order"):
                raise UserError(
                    f"{name}, which draws its own samples for each epoch (epoch_order), as a mixture cannot "
                    "ask of it; name its datasets here"
                )
        sizes = [len(dataset) for dataset in self.datasets]
        if not all(sizes):
            raise UserError(f"the datasets of the mixture have {sizes} samples; leave out the empty ones")
        given = sizes if weights is None or split != "train" else weights
        if len(given) != len(sizes) or not all(0 < weight < float("inf") for weight in given):
            raise UserError(
                f"data.dataset.weights is {given}, but must have a number above 0 for each of the "
                f"{len(sizes)} datasets"
            )
        total = sum(sizes) if num_samples is None or split != "train" else num_samples
        bounds = [round(total * part / sum(given)) for part in itertools.accumulate(given, initial=0)]
        self._counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        # Dataset k has indices for each of its passes, so that a sample is another one in another pass.
        passes = [-(-count // size) for count, size in zip(self._counts, sizes, strict=True)]
        spans = [number * size for number, size in zip(passes, sizes, strict=True)]
        self._begins = [0, *itertools.accumulate(spans)]

    def __len__(self) -> int:
        return sum(self._counts)

    def __getitem__(self, index: int) -> Any:
        return sample_of(*self.origin_of_sample(index))

    def origin_of_sample(self, index: int) -> tuple[Any, int]:
        """The dataset of a sample, and its index there."""
        number = bisect.bisect_right(self._begins, index) - 1
        dataset = self.datasets[number]
        return dataset, (index - self._begins[number]) % len(dataset)

    def epoch_order(self, generator: Generator) -> Tensor:
        """Indices of an epoch of training (see `trainer.data.order`)."""
        chosen = []
        for dataset, count, begin in zip(self.datasets, self._counts, self._begins, strict=False):
            whole = count // len(dataset) * len(dataset)
            rest = torch.randperm(len(dataset), generator=generator)[: count - whole]
            chosen += [torch.arange(begin, begin + whole), begin + whole + rest]
        every = torch.cat(chosen)
        return every[torch.randperm(len(every), generator=generator)]

    def __getattr__(self, name: str) -> Any:
        """The attribute that all datasets have, with equal values."""
        if name.startswith("_") or name in ("datasets", "draw", "lengths", "sample_weights", "set_epoch"):
            raise AttributeError(name)
        values = [getattr(dataset, name) for dataset in self.datasets]
        if any(value != values[0] for value in values):
            raise AttributeError(f"{name} differs: {values}")
        return values[0]
