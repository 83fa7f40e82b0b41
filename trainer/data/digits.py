"""The bundled dataset of 1,797 handwritten digits with 8x8 pixels, so that a first run needs no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49. This is its test set, as in scikit-learn's ``load_digits``.
Licence: CC BY 4.0.
"""

from pathlib import Path

import numpy as np
import torch

from trainer.data.images import ImagesInMemory, check_split

FILE = Path(__file__).with_name("digits.npz")
HOLD_OUT_EVERY = 5


class Digits(ImagesInMemory):
    """Handwritten digits: images (1, 8, 8), float32 in [0, 1], with labels from 0 to 9.

    Every fifth sample (index % 5 == 4) is used for validation: 1,438 training and 359 validation samples.
    """

    def __init__(self, split: str) -> None:
        check_split(split)
        with np.load(FILE) as file:
            images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
        held_out = torch.arange(len(labels)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
        chosen = held_out if split == "eval" else ~held_out
        super().__init__(images[chosen].unsqueeze(1).float() / 16, labels[chosen], num_classes=10)
