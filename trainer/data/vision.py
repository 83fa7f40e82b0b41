"""MNIST and CIFAR-10 from torchvision, in memory."""

from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torchvision import datasets

from trainer.data.images import ImagesInMemory, check_split
from trainer.errors import UserError


def mnist(split: str, root: str = "datasets", download: bool = False) -> ImagesInMemory:
    """Return MNIST: handwritten digits (1, 28, 28), 60,000 for training and 10,000 for evaluation."""
    return _load(datasets.MNIST, split, root, download, (0.1307,), (0.3081,))


def cifar10(split: str, root: str = "datasets", download: bool = False) -> ImagesInMemory:
    """Return CIFAR-10: photographs (3, 32, 32), 50,000 for training and 10,000 for evaluation."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _load(datasets.CIFAR10, split, root, download, mean, std)


def _load(
    source: Any, split: str, root: str, download: bool, mean: tuple[float, ...], std: tuple[float, ...]
) -> ImagesInMemory:
    check_split(split)
    folder = Path(root).resolve()
    if download:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # the ranks of a host share the folder; one of them downloads
            try:
                source(folder, train=True, download=True)
            except (RuntimeError, OSError) as error:
                raise UserError(f"failed to download {source.__name__} to {folder}: {error}") from error
    try:
        data = source(folder, train=split == "train")
        images = torch.as_tensor(data.data)  # (N, H, W) or (N, H, W, C)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise UserError(
            f"{source.__name__} is missing from {folder}, or damaged; set data.download=true to download it, "
            "or data.dataset.root to another folder"
        ) from error
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return ImagesInMemory(images, torch.as_tensor(data.targets), len(data.classes), mean, std)
