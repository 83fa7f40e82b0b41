"""A mixture of datasets in given proportions."""

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
    """A mixture of datasets that are read by index.

    A training epoch has `num_samples` samples, which are divided among the datasets in proportion to their
    weights, rounded to whole samples. If a dataset has fewer samples than its part, its samples are repeated
    with different augmentation; if it has more, a different subset is drawn in each epoch. Validation data is
    the concatenation of all datasets.

    The mixture has the attributes that all datasets have with equal values, such as num_classes.

    Args:
        split: train or eval; passed to `datasets`.
        datasets: functions that return a dataset; in the config, nodes with `_partial_: true`.
        weights: one number above 0 per dataset; None uses the sizes of the datasets.
        num_samples: number of samples per training epoch; None uses the total size of the datasets.

    Raises:
        UserError: a dataset is a stream, a mixture or empty, or the weights are invalid.
    """

    def __init__(
        self,
        split: str,
        datasets: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
    ) -> None:
        if not isinstance(datasets, Sequence) or not datasets:
            raise UserError("data.dataset.datasets: expected a list of datasets, each with _partial_: true")
        check_at_least_one(num_samples=num_samples)
        self.datasets = [make(split=split) for make in datasets]
        for number, dataset in enumerate(self.datasets):
            name = f"data.dataset.datasets[{number}] is a {type(dataset).__name__}"
            if is_stream(dataset):
                raise UserError(
                    f"{name}, which is a stream, but a mixture needs datasets that are read by index; "
                    "combine streams with, for example, interleave_datasets of Hugging Face's datasets"
                )
            if hasattr(dataset, "epoch_order"):
                raise UserError(
                    f"{name}, which is not supported in a mixture, because it chooses its own samples in "
                    "each epoch (epoch_order); if it is a mixture, list its datasets here instead"
                )
        sizes = [len(dataset) for dataset in self.datasets]
        if not all(sizes):
            raise UserError(f"the datasets of the mixture have {sizes} samples; remove the empty datasets")
        given = sizes if weights is None or split != "train" else weights
        if len(given) != len(sizes) or not all(0 < weight < float("inf") for weight in given):
            raise UserError(
                f"data.dataset.weights={given}: expected a number above 0 for each of the {len(sizes)} "
                "datasets"
            )
        total = sum(sizes) if num_samples is None or split != "train" else num_samples
        bounds = [round(total * part / sum(given)) for part in itertools.accumulate(given, initial=0)]
        self._counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        # Each pass over a dataset has its own indices, so that a repeated sample is augmented differently.
        passes = [-(-count // size) for count, size in zip(self._counts, sizes, strict=True)]
        spans = [number * size for number, size in zip(passes, sizes, strict=True)]
        self._starts = [0, *itertools.accumulate(spans)]

    def __len__(self) -> int:
        return sum(self._counts)

    def __getitem__(self, index: int) -> Any:
        return sample_of(*self.origin_of_sample(index))

    def origin_of_sample(self, index: int) -> tuple[Any, int]:
        """Return the dataset that contains sample `index`, and the index of the sample in that dataset."""
        number = bisect.bisect_right(self._starts, index) - 1
        dataset = self.datasets[number]
        return dataset, (index - self._starts[number]) % len(dataset)

    def epoch_order(self, generator: Generator) -> Tensor:
        """Return the indices of a training epoch (see `trainer.data.order`)."""
        chosen = []
        for dataset, count, start in zip(self.datasets, self._counts, self._starts, strict=False):
            whole = count // len(dataset) * len(dataset)
            rest = torch.randperm(len(dataset), generator=generator)[: count - whole]
            chosen += [torch.arange(start, start + whole), start + whole + rest]
        indices = torch.cat(chosen)
        return indices[torch.randperm(len(indices), generator=generator)]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that all datasets have with equal values."""
        if name.startswith("_") or name in ("datasets", "draw", "lengths", "sample_weights", "set_epoch"):
            raise AttributeError(name)
        values = [getattr(dataset, name) for dataset in self.datasets]
        if any(value != values[0] for value in values):
            raise AttributeError(f"{name} differs: {values}")
        return values[0]
