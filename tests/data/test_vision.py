"""MNIST, Fashion-MNIST and CIFAR-10 from files in their original formats, with a few images."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from torchvision import datasets

from trainer.data import vision
from trainer.data.device import Normalise, ToDevice
from trainer.data.images import ImagesInMemory
from trainer.errors import UserError


def write_mnist(root: Path, name: str) -> np.ndarray:
    """IDX files: a magic number, the sizes as big-endian integers, the bytes."""
    folder = root / name / "raw"
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


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(first: int, last: int) -> dict[str, Any]:
        return {
            "data": images[first:last].reshape(last - first, -1),
            "labels": [i % 10 for i in range(first, last)],
        }

    # torchvision checks the hashes of the real files; these have others
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [write("data_batch_1", batch(0, 16))])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [write("test_batch", batch(16, 24))])
    name, md5 = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return images


def normalised(dataset: ImagesInMemory, images: torch.Tensor) -> torch.Tensor:
    cpu = torch.device("cpu")
    return ToDevice(cpu, False, Normalise(dataset.mean, dataset.std, cpu))(images)


@pytest.mark.parametrize(("build", "name"), [(vision.mnist, "MNIST"), (vision.fashion_mnist, "FashionMNIST")])
def test_mnist(tmp_path: Path, build: Any, name: str) -> None:
    images = write_mnist(tmp_path, name)
    train, held_out = build("train", str(tmp_path)), build("eval", str(tmp_path))
    assert (len(train), len(held_out), train.num_classes, train.input_shape) == (16, 8, 10, (1, 28, 28))
    mean, std = {"MNIST": (0.1307, 0.3081), "FashionMNIST": (0.2860, 0.3530)}[name]
    batch, labels = held_out.__getitems__([0, 5])
    expected = (images[[16, 21]].astype(np.float32) / 255 - mean) / std
    assert (batch.dtype, labels.tolist()) == (torch.uint8, [6, 1])
    torch.testing.assert_close(normalised(held_out, batch), torch.from_numpy(expected).float().unsqueeze(1))


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_cifar(tmp_path, monkeypatch)
    train = vision.cifar10("train", str(tmp_path))
    assert (len(train), train.num_classes, train.input_shape) == (16, 10, (3, 32, 32))
    mean = np.array([0.4914, 0.4822, 0.4465]).reshape(3, 1, 1)
    std = np.array([0.2470, 0.2435, 0.2616]).reshape(3, 1, 1)
    image, label = train[3]
    expected = torch.from_numpy((images[3] / 255 - mean) / std).float()
    torch.testing.assert_close(normalised(train, image[None])[0], expected)
    assert label == 3


@pytest.mark.parametrize("build", [vision.mnist, vision.fashion_mnist, vision.cifar10])
def test_data_that_is_not_there_is_named_with_the_way_to_get_it(tmp_path: Path, build: Any) -> None:
    with pytest.raises(UserError, match=rf"missing from {tmp_path}.*data\.download=true"):
        build("train", str(tmp_path))


def test_download_is_asked_of_torchvision_only_where_files_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in a test")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", no_network)
    with pytest.raises(UserError, match=r"MNIST cannot be downloaded to .*no network in a test"):
        vision.mnist("train", str(tmp_path), download=True)
    write_mnist(tmp_path / "there", "MNIST")
    assert len(vision.mnist("train", str(tmp_path / "there"), download=True)) == 16
