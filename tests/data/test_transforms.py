"""Transforms from the settings, images normalised on the device."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import v2

from tests.data.settings import CPU, train_loader
from tests.runs import settings
from trainer.build.data import build_dataset, build_to_device
from trainer.data.device import Normalise, ToDevice
from trainer.data.images import ImagesInMemory
from trainer.data.transforms import Transformed
from trainer.errors import UserError

PIXELS = torch.arange(24 * 3 * 8 * 8).view(24, 3, 8, 8).remainder(251).to(torch.uint8)
IN_MEMORY = ImagesInMemory(PIXELS, torch.arange(24), 24, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


class OneByOne(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "image": PIXELS[index]}


class Forward(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return map(OneByOne().__getitem__, range(24))


@pytest.mark.parametrize("channels_last", [False, True])
def test_bytes_become_floats_on_the_device(channels_last: bool) -> None:
    Batch = namedtuple("Batch", ["label", "image", "mask"])
    labels, mask = torch.arange(4), torch.ones(4, 1, 8, 8, dtype=torch.uint8)
    to_device = ToDevice(CPU, channels_last, Normalise(IN_MEMORY.mean, IN_MEMORY.std, CPU))
    expected = v2.Normalize(IN_MEMORY.mean, IN_MEMORY.std)(PIXELS[:4] / 255)
    for batch in ((labels, PIXELS[:4], mask), [labels, PIXELS[:4], mask], Batch(labels, PIXELS[:4], mask)):
        ready = to_device(batch)
        assert type(ready) is type(batch)
        torch.testing.assert_close(ready[1], expected, atol=1e-6, rtol=0)
        assert ready[1].is_contiguous(memory_format=torch.channels_last) == channels_last
        assert torch.equal(ready[0], labels) and torch.equal(ready[2], mask)  # only the first is the image
    torch.testing.assert_close(to_device({"x": PIXELS[:4]})["x"], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(to_device(PIXELS[:4]), expected, atol=1e-6, rtol=0)
    assert torch.equal(to_device([labels])[0], labels)
    floats = torch.randn(2, 3, 8, 8)
    assert torch.equal(to_device((floats,))[0], floats)
    with pytest.raises(
        UserError, match=r"mean=\[0\.5, 0\.4, 0\.3\] has 3 values, but the images have 2 channels"
    ):
        to_device(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


class MovesInPlace:
    """A common implementation of `to`, which returns None."""

    def __init__(self) -> None:
        self.rows = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.rows = self.rows.to(device)


def test_an_object_may_move_itself_in_place() -> None:
    batch = MovesInPlace()
    assert ToDevice(torch.device("meta"), False, None)(batch) is batch and batch.rows.is_meta


def test_configured_transforms_change_only_the_image() -> None:
    config = settings(
        "data=fake",
        "data.dataset.input_shape=[3,8,8]",
        "data.train_transforms=[{_target_:torchvision.transforms.v2.RandomCrop,size:6},{_target_:torchvision.transforms.v2.Grayscale}]",
        "data.images.mean=[0.5]",
        "data.images.std=[0.25]",
    )
    train, held_out = build_dataset(config.data, "train"), build_dataset(config.data, "eval")
    assert (train.input_shape, train.num_classes, held_out.input_shape) == ((1, 6, 6), 10, (3, 8, 8))
    image, label = train[3]
    assert image.shape == (1, 6, 6)
    assert label == train.dataset[3][1]
    loader = train_loader(train, 8)
    assert torch.equal(loader.epoch(2).take()[0][0], loader.epoch(2).take()[0][0])
    to_device = build_to_device(config, CPU, train)
    white = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    torch.testing.assert_close(to_device(white), torch.full((1, 1, 2, 2), 2.0))


def test_unsuitable_transforms_are_named() -> None:
    class Pictures(OneByOne):
        def __getitem__(self, index: int) -> Any:
            return Image.new("RGB", (8, 8)), index

    with pytest.raises(
        UserError,
        match=r"x must return a tensor for each sample of Pictures, but a sample contains Image, int; add",
    ):
        Transformed(Pictures(), [v2.CenterCrop(4)], "x").input_shape  # noqa: B018
    assert Transformed(Pictures(), [v2.CenterCrop(4), v2.PILToTensor()], "x").input_shape == (3, 4, 4)
    with pytest.raises(UserError, match="because it is a stream; transform the samples in the stream"):
        Transformed(Forward(), [], "data.train_transforms")
    with pytest.raises(UserError, match=r"data\.images\.mean is \[0\.5\], but data\.images\.std is None"):
        settings("data.images.mean=[0.5]")
