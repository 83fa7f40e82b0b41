"""The embedded digits, of which every fifth is held out; and random images."""

import numpy as np
import pytest
import torch

from trainer.data.digits import FILE, Digits
from trainer.data.images import Fake
from trainer.errors import UserError


def test_the_file_contains_the_whole_data_set_in_100_kb() -> None:
    assert FILE.stat().st_size <= 100_000
    with np.load(FILE) as file:
        images, labels = file["images"], file["labels"]
    assert images.shape == (1797, 8, 8)
    assert (images.min(), images.max(), int(images.sum())) == (0, 16, 561_718)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert "CC BY 4.0" in FILE.with_suffix(".txt").read_text()


def test_every_fifth_sample_is_held_out() -> None:
    with np.load(FILE) as file:
        images = torch.from_numpy(file["images"]).float().unsqueeze(1) / 16
    train, held_out = Digits("train"), Digits("eval")
    assert (len(train), len(held_out)) == (1438, 359)
    assert torch.equal(held_out.images, images[4::5])
    assert torch.equal(train.images[:5], images[[0, 1, 2, 3, 5]])
    assert train.input_shape == (1, 8, 8)
    assert train.num_classes == 10


def test_every_rank_draws_the_same_random_images() -> None:
    one, other, held_out = (Fake(split, 50, [1, 4, 6], 3, seed=1) for split in ("train", "train", "eval"))
    assert (len(one), one.input_shape, one.num_classes) == (50, (1, 4, 6), 3)
    assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
    assert not torch.equal(one.images, held_out.images) and set(one.labels.tolist()) == {0, 1, 2}
    with pytest.raises(UserError, match="num_samples=0: expected at least 1"):
        Fake("train", num_samples=0)
