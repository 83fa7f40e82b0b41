"""Transforms from the settings, images normalised and mirrored on the device: each sample has its own randomness."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import v2

from tests.data.settings import CPU, train_loader
from tests.runs import settings
from trainer.build import build_dataset, build_to_device
from trainer.data.device import Mirrored, Normalise, ToDevice
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


def mirrored_ids(dataset: Any, epoch: int = 0, first_sample: int = 0, **loader: Any) -> dict[int, bool]:
    """Whether each image read is mirrored; every image must be mirrored or unchanged."""
    found = {}
    for batch in train_loader(dataset, 8, mirrors=True, **loader).epoch(epoch, first_sample):
        ready = ToDevice(CPU, False, None)(batch)
        images, ids = (ready["image"], ready["id"]) if isinstance(ready, dict) else ready
        for image, sample in zip(images, ids.tolist(), strict=True):
            found[sample] = not torch.equal(image, PIXELS[sample])
            assert torch.equal(image.flip(-1) if found[sample] else image, PIXELS[sample])
    return found


class Forward(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return map(OneByOne().__getitem__, range(24))


@pytest.mark.parametrize("dataset", [IN_MEMORY, OneByOne(), Forward()])
def test_who_is_mirrored_depends_on_seed_epoch_and_index_alone(dataset: Any) -> None:
    alone = mirrored_ids(dataset)
    assert len(alone) == 24 and 4 < sum(alone.values()) < 20
    assert mirrored_ids(dataset, num_workers=2) == alone
    halves = [mirrored_ids(dataset, num_replicas=2, replica=replica, micro=2) for replica in (0, 1)]
    assert halves[0] | halves[1] == alone
    resumed = mirrored_ids(dataset, first_sample=8)
    assert resumed == {sample: alone[sample] for sample in resumed} and len(resumed) == 16
    assert mirrored_ids(dataset, epoch=1) != alone
    assert mirrored_ids(dataset, seed=1) != alone


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
        UserError, match=r"mean=\[0\.5, 0\.4, 0\.3\] is for 3 channels, but the images have 2"
    ):
        to_device(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


def test_floats_cannot_be_mirrored_on_the_device() -> None:
    floats = ImagesInMemory(torch.randn(8, 1, 4, 4), torch.arange(8), 8)
    [batch] = train_loader(floats, 8, mirrors=True).epoch(0)
    with pytest.raises(UserError, match=r"data\.images\.flip is true, but the batch holds no uint8 images"):
        ToDevice(CPU, False, None)(batch)


def test_a_mask_that_would_not_be_mirrored_is_named() -> None:
    pixels = torch.zeros(8, 1, 4, 4, dtype=torch.uint8)
    batch = Mirrored((pixels, torch.zeros(8, 4, 4)), torch.ones(8, dtype=torch.bool))
    with pytest.raises(UserError, match=r"also has torch.float32 \(8, 4, 4\), which would stay as it is"):
        ToDevice(CPU, False, None)(batch)
    ToDevice(CPU, False, None)(Mirrored((pixels, torch.zeros(8)), torch.ones(8, dtype=torch.bool)))


class MovesInPlace:
    """As many write `to`: it returns nothing."""

    def __init__(self) -> None:
        self.rows = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.rows = self.rows.to(device)


def test_an_object_may_move_itself_in_place() -> None:
    batch = MovesInPlace()
    assert ToDevice(torch.device("meta"), False, None)(batch) is batch and batch.rows.is_meta


def test_transforms_of_the_settings_change_the_image_alone() -> None:
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


def test_transforms_that_do_not_fit_are_named() -> None:
    class Pictures(OneByOne):
        def __getitem__(self, index: int) -> Any:
            return Image.new("RGB", (8, 8)), index

    with pytest.raises(
        UserError, match=r"x must yield a tensor in each sample of Pictures, but Image, int; let it end"
    ):
        Transformed(Pictures(), [v2.CenterCrop(4)], "x").input_shape  # noqa: B018
    assert Transformed(Pictures(), [v2.CenterCrop(4), v2.PILToTensor()], "x").input_shape == (3, 4, 4)
    with pytest.raises(UserError, match="a stream transforms its own samples"):
        Transformed(Forward(), [], "data.train_transforms")
    with pytest.raises(UserError, match=r"data\.images\.mean is \[0\.5\], but data\.images\.std is None"):
        settings("data.images.mean=[0.5]")
