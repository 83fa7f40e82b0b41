import pytest
import torch

from trainer.data.fake import Fake
from trainer.errors import UserError


def test_every_rank_draws_the_same_images() -> None:
    one, other, held_out = Fake("train"), Fake("train"), Fake("eval")
    assert one.images.shape == (2048, 3, 32, 32)
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.labels, other.labels)
    assert not torch.equal(one.images, held_out.images)
    assert set(one.labels.tolist()) == set(range(10))


def test_sizes_are_settable() -> None:
    fake = Fake("train", num_samples=5, input_shape=[1, 4, 6], num_classes=3, seed=1)
    assert (len(fake), fake.input_shape, fake.num_classes) == (5, (1, 4, 6), 3)
    assert not torch.equal(fake.images, Fake("train", 5, (1, 4, 6), 3, seed=2).images)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"input_shape=\[3, 32\]"):
        Fake("train", input_shape=[3, 32])
