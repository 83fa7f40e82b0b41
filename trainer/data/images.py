"""Images held in memory as two tensors, a batch of which is one indexing step."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import UserError

SPLITS = ("train", "eval")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(f"split={split!r} is not one of {', '.join(SPLITS)}")


class ImagesInMemory(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images, fetched a whole batch at a time.

    Args:
        images: (N, C, H, W). Floats are handed out as they stand; uint8 stays uint8 in memory, a quarter of
            the size, and is scaled to [0, 1] and normalised by ``mean`` and ``std`` when fetched.
        labels: (N,), any integer dtype.
        mean, std: one value for each channel.
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
        # (x / 255 - mean) / std, folded into one multiplication and one addition
        self.scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
        self.shift = -torch.tensor(mean).view(-1, 1, 1) / torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.as_float(self.images[index]), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch (images (B, C, H, W) float32, labels (B,) int64), already collated."""
        where = torch.from_numpy(
            np.asarray(indices, dtype=np.int64)
        )  # torch parses a list at a third the speed
        return self.as_float(self.images.index_select(0, where)), self.labels.index_select(0, where)

    def as_float(self, images: Tensor) -> Tensor:
        """One image or a batch, as it goes to the model."""
        return images * self.scale + self.shift if images.dtype == torch.uint8 else images


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, each changed at random when fetched, so sample by sample: no ``__getitems__``."""

    def __init__(self, images: ImagesInMemory, augment: Callable[[Tensor], Tensor]) -> None:
        self.originals = images
        self.augment = augment
        self.num_classes = images.num_classes
        self.input_shape = images.input_shape

    def __len__(self) -> int:
        return len(self.originals)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        changed = self.augment(self.originals.images[index])
        return self.originals.as_float(changed), self.originals.labels[index]
