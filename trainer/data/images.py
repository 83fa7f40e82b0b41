"""Datasets of images in memory, from which one indexing operation fetches a batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import UserError

SPLITS = ("train", "eval")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(f"split={split!r}: expected one of {', '.join(SPLITS)}")


def check_at_least_one(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and value < 1:
            raise UserError(f"data.dataset.{name}={value}: expected at least 1")


class ImagesInMemory(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images, fetched a whole batch at a time.

    Args:
        images: (N, C, H, W). Floats are returned unchanged; uint8 images are normalised on the device.
        labels: (N,), any integer dtype.
        mean, std: one value per channel, or one for all channels.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        self.images = images
        self.labels = labels.long()
        self.num_classes = num_classes
        self.input_shape = tuple(images.shape[1:])
        self.mean, self.std = tuple(mean), tuple(std)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a collated batch: images (B, C, H, W), and labels (B,), int64."""
        # NumPy converts a list three times as fast as torch.
        where = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self.images.index_select(0, where), self.labels.index_select(0, where)


class Fake(ImagesInMemory):
    """Standard normal images with random labels, equal on all ranks and different for each split."""

    def __init__(
        self,
        split: str,
        num_samples: int = 2048,
        input_shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        seed: int = 0,
    ) -> None:
        check_split(split)
        check_at_least_one(num_samples=num_samples, num_classes=num_classes)
        generator = torch.Generator().manual_seed(2 * seed + (split == "eval"))
        super().__init__(
            torch.randn(num_samples, *input_shape, generator=generator),
            torch.randint(num_classes, (num_samples,), generator=generator),
            num_classes,
        )
