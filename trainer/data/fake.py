"""Random images: throughput without a disk, and shapes without a data set."""

import math
from collections.abc import Sequence

import torch

from trainer.data.images import ImagesInMemory, check_split
from trainer.errors import UserError


class Fake(ImagesInMemory):
    """Standard normal images with random labels, the same on every rank; each split has its own."""

    def __init__(
        self,
        split: str,
        num_samples: int = 2048,
        input_shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        seed: int = 0,
    ) -> None:
        check_split(split)
        if num_samples < 1 or num_classes < 1 or len(input_shape) != 3 or math.prod(input_shape) < 1:
            raise UserError(
                f"num_samples={num_samples}, num_classes={num_classes} and the three numbers of "
                f"input_shape={list(input_shape)} (channels, height, width) must each be at least 1"
            )
        generator = torch.Generator().manual_seed(2 * seed + (split == "eval"))
        super().__init__(
            torch.randn(num_samples, *input_shape, generator=generator),
            torch.randint(num_classes, (num_samples,), generator=generator),
            num_classes,
        )
