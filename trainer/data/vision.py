"""MNIST, Fashion-MNIST and CIFAR-10 from torchvision, held in memory.

Each raises UserError if the data is missing, damaged, or cannot be downloaded.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from trainer.data.images import ImagesInMemory, check_split
from trainer.data.transforms import Transformed
from trainer.errors import UserError


def mnist(
    split: str, root: str = "datasets", download: bool = False, augment: bool = False
) -> ImagesInMemory | Transformed:
    """Handwritten digits, (1, 28, 28), 60,000 and 10,000; ``augment`` shifts by up to 2 pixels."""
    images = _load(datasets.MNIST, split, root, download, (0.1307,), (0.3081,))
    return _augmented(images, split, augment, v2.RandomCrop(28, padding=2))


def fashion_mnist(
    split: str, root: str = "datasets", download: bool = False, augment: bool = False
) -> ImagesInMemory | Transformed:
    """Articles of clothing, (1, 28, 28), 60,000 and 10,000; ``augment`` shifts by 2 pixels and mirrors."""
    images = _load(datasets.FashionMNIST, split, root, download, (0.2860,), (0.3530,))
    return _augmented(images, split, augment, v2.RandomCrop(28, padding=2), v2.RandomHorizontalFlip())


def cifar10(
    split: str, root: str = "datasets", download: bool = False, augment: bool = False
) -> ImagesInMemory | Transformed:
    """Small photographs, (3, 32, 32), 50,000 and 10,000; ``augment`` shifts by up to 4 pixels and mirrors."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    images = _load(datasets.CIFAR10, split, root, download, mean, std)
    return _augmented(images, split, augment, v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip())


def _augmented(
    images: ImagesInMemory, split: str, augment: bool, *transforms: Callable[[Tensor], Tensor]
) -> ImagesInMemory | Transformed:
    return Transformed(images, transforms, "data.dataset.augment") if augment and split == "train" else images


def _load(
    source: Any, split: str, root: str, download: bool, mean: tuple[float, ...], std: tuple[float, ...]
) -> ImagesInMemory:
    check_split(split)
    folder = Path(root).resolve()
    if download:
        with _alone_in(folder):  # the ranks of a host share the folder: the first downloads
            try:
                source(folder, train=True, download=True)
            except (RuntimeError, OSError) as error:
                raise UserError(f"{source.__name__} cannot be downloaded to {folder}: {error}") from error
    try:
        data = source(folder, train=split == "train")
        images = torch.as_tensor(data.data)  # (N, H, W) or (N, H, W, C)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise UserError(
            f"{source.__name__} is missing from {folder}, or damaged: data.download=true downloads it, "
            f"data.dataset.root names another folder"
        ) from error
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return ImagesInMemory(images, torch.as_tensor(data.targets), len(data.classes), mean, std)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel frees if its holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
