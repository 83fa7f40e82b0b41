"""The embedded data set: 1,797 handwritten digits, 8x8 pixels, so that a first run needs no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49: its test set, as in scikit-learn's ``load_digits``.
Licence: CC BY 4.0.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from trainer.data.images import SPLITS, ImagesInMemory, check_split
from trainer.errors import UserError

FILE = Path(__file__).with_name("digits.npz")
HOLD_OUT_EVERY = 5


class Digits(ImagesInMemory):
    """Images of shape (1, 8, 8), float32 in [0, 1], with labels 0..9.

    Every fifth sample (index % 5 == 4) is held out: 1,438 to train on, 359 for ``split="eval"``.
    """

    def __init__(self, split: str) -> None:
        check_split(split)
        with np.load(FILE) as file:
            images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
        held_out = torch.arange(len(labels)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
        chosen = held_out if split == "eval" else ~held_out
        super().__init__(images[chosen].unsqueeze(1).float() / 16, labels[chosen], num_classes=10)


class DigitTraits(Digits):
    """The digits, each with four traits (4,) of 0 and 1: a closed loop, even, prime, at least five."""

    traits = ({0, 6, 8, 9}, {0, 2, 4, 6, 8}, {2, 3, 5, 7}, {5, 6, 7, 8, 9})

    def __init__(self, split: str) -> None:
        super().__init__(split)
        table = torch.tensor([[float(digit in those) for those in self.traits] for digit in range(10)])
        self.labels, self.num_classes = table[self.labels], len(self.traits)


class TurnedDigits(Digits):
    """The digits, each rotated about its centre. The target is the angle in degrees, (1,), drawn once.

    Args:
        degrees: the largest angle in either direction.
    """

    def __init__(self, split: str, degrees: float = 45.0) -> None:
        if not 0 < degrees <= 180:
            raise UserError(f"data.dataset.degrees={degrees} must be above 0 and at most 180")
        super().__init__(split)
        generator = torch.Generator().manual_seed(SPLITS.index(split))
        angles = (torch.rand(len(self), generator=generator) * 2 - 1) * degrees
        cos, sin, zero = (
            (angles * math.pi / 180).cos(),
            (angles * math.pi / 180).sin(),
            torch.zeros(len(self)),
        )
        turns = torch.stack([cos, sin, zero, -sin, cos, zero], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(turns, list(self.images.shape), align_corners=False)
        self.images = F.grid_sample(self.images, grid, align_corners=False)
        self.labels, self.num_classes = angles[:, None], 1  # one number to predict
