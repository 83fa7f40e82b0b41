"""Transforms of samples that the settings add to a dataset, and random mirroring."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from trainer.data.device import Mirrored
from trainer.data.loading.collation import Collate, collated_batch, name_of
from trainer.data.loading.reader import fetches_batches, generators_kept, sample_of
from trainer.errors import UserError
from trainer.nested import leaves


class _Upon(Dataset[Any]):
    """Wraps another dataset and exposes its attributes (num_classes, mean and the like).

    Args:
        setting: the setting that asked for the wrapper, for messages.
    """

    def __init__(self, dataset: Any, setting: str) -> None:
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"{setting} is for data that is read by index; a stream transforms its own samples"
            )
        self.dataset, self.class_name = dataset, name_of(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "draw"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Transformed(_Upon):
    """Applies `transforms`, as those of torchvision's transforms.v2, to each sample that is read.

    In a tuple or dict they change the image: a PIL image, a tv_tensor or, without either, the first tensor.
    Their random numbers follow from (seed, epoch, index), as for any dataset.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[..., Any]], setting: str) -> None:
        super().__init__(dataset, setting)
        from torchvision.transforms import v2  # imported here, since it takes half a second

        self._transform, self._setting = v2.Compose(transforms), setting

    def __getitem__(self, index: int) -> Any:
        return self._transform(sample_of(self.dataset, index))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the first tensor in a transformed sample."""
        with generators_kept():
            values = leaves(self[0])
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        if not shapes:
            raise UserError(
                f"{self._setting} must yield a tensor in each sample of {type(self.dataset).__name__}, but "
                f"{', '.join(type(value).__name__ for value in values)}; let it end with "
                "{_target_: torchvision.transforms.v2.PILToTensor}"
            )
        return shapes[0]


class _EachMirrored(_Upon):
    def __getitem__(self, index: int) -> Mirrored:
        return Mirrored(sample_of(self.dataset, index), torch.rand(()) < 0.5)


class _BatchesMirrored(_Upon):
    """For a dataset that returns whole batches: each sample's random number decides."""

    def __init__(self, dataset: Any, setting: str, collate: Collate) -> None:
        super().__init__(dataset, setting)
        self._collate = collate

    def draw(self, indices: Sequence[int], numbers: np.ndarray) -> Mirrored:
        own = getattr(self.dataset, "draw", None)
        fetched = own(indices, numbers) if own else self.__getitems__(indices)
        batch = collated_batch(fetched, self, indices, self._collate)
        return Mirrored(batch, torch.from_numpy(numbers >> np.uint64(63) == 1))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.dataset.__getitems__(indices)


def mirrored_at_random(dataset: Any, collate: Collate = default_collate) -> Dataset[Any]:
    """Mirror each training image on the device with probability 1/2, drawn from (seed, epoch, index)."""
    if fetches_batches(dataset):
        return _BatchesMirrored(dataset, "data.images.flip", collate)
    return _EachMirrored(dataset, "data.images.flip")
