"""MNIST and CIFAR-10 from files in their original formats, with a few images."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from trainer.data import vision
from trainer.data.device import Normalise, ToDevice
from trainer.data.images import ImagesInMemory
from trainer.errors import UserError


def write_mnist(root: Path) -> np.ndarray:
    """IDX files: a magic number, the sizes as big-endian integers, the bytes."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (24, 28, 28), dtype=np.uint8)
    for part, first, last in (("train", 0, 16), ("t10k", 16, 24)):
        chosen = images[first:last]
        header = struct.pack(">4i", 2051, len(chosen), 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + chosen.tobytes())
        labels = np.arange(first, last, dtype=np.uint8) % 10
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, len(chosen)) + labels.tobytes()
        )
    return images


def normalised(dataset: ImagesInMemory, images: torch.Tensor) -> torch.Tensor:
    cpu = torch.device("cpu")
    return ToDevice(cpu, False, Normalise(dataset.mean, dataset.std, cpu))(images)


def test_mnist(tmp_path: Path) -> None:
    images = write_mnist(tmp_path)
    train, held_out = vision.mnist("train", str(tmp_path)), vision.mnist("eval", str(tmp_path))
    assert (len(train), len(held_out), train.num_classes, train.input_shape) == (16, 8, 10, (1, 28, 28))
    batch, labels = held_out.__getitems__([0, 5])
    expected = (images[[16, 21]].astype(np.float32) / 255 - 0.1307) / 0.3081
    assert (batch.dtype, labels.tolist()) == (torch.uint8, [6, 1])
    torch.testing.assert_close(normalised(held_out, batch), torch.from_numpy(expected).float().unsqueeze(1))


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data has torchvision's layout: channels last, and labels in a list."""
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    source = SimpleNamespace(data=images, targets=list(range(8)), classes=list("abcdefghij"))
    monkeypatch.setattr(vision.datasets, "CIFAR10", lambda folder, train: source)
    train = vision.cifar10("train", str(tmp_path))
    assert (len(train), train.num_classes, train.input_shape) == (8, 10, (3, 32, 32))
    image, label = train[3]
    expected = (images[3] / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    torch.testing.assert_close(
        normalised(train, image[None])[0], torch.from_numpy(expected).float().permute(2, 0, 1)
    )
    assert label == 3


@pytest.mark.parametrize("build", [vision.mnist, vision.cifar10])
def test_missing_data_is_named_with_the_way_to_get_it(tmp_path: Path, build: Any) -> None:
    with pytest.raises(UserError, match=rf"missing from {tmp_path}.*data\.download=true"):
        build("train", str(tmp_path))


def test_torchvision_downloads_only_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in a test")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", no_network)
    with pytest.raises(UserError, match=r"failed to download MNIST to .*no network in a test"):
        vision.mnist("train", str(tmp_path), download=True)
    write_mnist(tmp_path / "there")
    assert len(vision.mnist("train", str(tmp_path / "there"), download=True)) == 16
