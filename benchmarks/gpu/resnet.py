"""Compare images/s of ResNet-50 (bf16, channels last) with a plain loop, from memory and JPEG files."""

import itertools
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2

from benchmarks.gpu.day import Day, Row, contexts, in_turns, ratio, steps
from benchmarks.image_loading import write_photographs
from trainer.data.imagefolder import MEAN, STD

_DISTINCT = 64
OVERRIDES = (
    *("data=fake", "data.dataset._target_=benchmarks.gpu.resnet.Synthetic", "model=resnet50"),
    *(
        "data.dataset.input_shape=[3,224,224]",
        "data.dataset.num_classes=1000",
        "data.dataset.num_samples=512",
    ),
    *(
        "train.precision=bf16",
        "train.channels_last=true",
        "train.global_batch_size=64",
        "train.epochs=100000",
    ),
)


class Synthetic:
    """Random uint8 images that repeat, normalised on the device as with data=imagefolder."""

    mean, std = MEAN, STD

    def __init__(
        self, split: str, num_samples: int, input_shape: list[int], num_classes: int, seed: int = 0
    ) -> None:
        self.input_shape, self.num_classes, self._num_samples = tuple(input_shape), num_classes, num_samples
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.randint(256, (_DISTINCT, *input_shape), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index % _DISTINCT], index % self.num_classes


def from_memory(day: Day, batch_size: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield eight batches from pinned memory in turn, without data loading."""
    images = [torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8) for _ in range(8)]
    labels = [torch.randint(1000, (batch_size,)) for _ in range(8)]
    if day.on_gpu:
        images, labels = [each.pin_memory() for each in images], [each.pin_memory() for each in labels]
    return itertools.cycle(zip(images, labels, strict=True))


def from_files(root: Path, batch_size: int, size: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    way = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    loader: Iterable[Any] = DataLoader(
        datasets.ImageFolder(root / "train", way),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    while True:
        yield from loader


def plain(day: Day, batches: Iterator[tuple[Tensor, Tensor]], name: str, classes: int) -> Iterator[None]:
    """Run a plain PyTorch loop that is optimised for the GPU; yield after each step."""
    torch.backends.cudnn.benchmark = True
    model: nn.Module = models.get_model(name, num_classes=classes)
    model = model.to(day.device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    mean = torch.tensor(MEAN, device=day.device).view(1, 3, 1, 1) * 255
    std = torch.tensor(STD, device=day.device).view(1, 3, 1, 1) * 255
    for images, labels in batches:
        x = images.to(day.device, non_blocking=True, memory_format=torch.channels_last)
        y = labels.to(day.device, non_blocking=True)
        x = (x - mean) / std
        with torch.autocast(day.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield


def measure(day: Day) -> Iterator[Row]:
    size, batch_size, samples = day.size((224, 256, 256_000), (64, 2, 64))
    name, workers, photographs = day.size(("resnet50", 16, 1024), ("resnet18", 0, 4))
    # Rounds from files are long, because data workers read ahead while the other variant runs.
    turns, each, long = day.size((5, 10, 60), (1, 1, 1))
    common = (
        *(f"model={name}", f"train.global_batch_size={batch_size}", "train.max_steps=100000"),
        *(f"data.num_workers={workers}", "data.prefetch_factor=4", "optim.lr=0.01"),
    )
    with tempfile.TemporaryDirectory() as folder, contexts() as context:
        root = Path(folder)
        write_photographs(root, photographs)
        for file in sorted((root / "train/things").iterdir()):  # makes an epoch longer than any round
            for number in range(day.size(120, 1)):
                os.link(file, file.with_name(f"{file.stem}_{number}.jpg"))
        shape = (f"data.dataset.input_shape=[3,{size},{size}]", f"data.dataset.num_samples={samples}")
        files = ("experiment=imagefolder_resnet50", f"data.dataset.root={root}", "schedule.warmup_steps=0")
        files += (f"data.dataset.image_size={size}", "train.epochs=100000")
        sources = {
            "from memory": (from_memory(day, batch_size, size), 1000, each, (*OVERRIDES, *common, *shape)),
            "from JPEG": (from_files(root, batch_size, size, workers), 1, long, (*files, *common)),
        }
        for source, (batches, classes, steps_each, overrides) in sources.items():
            variants = {
                "plain loop": plain(day, batches, name, classes),
                "Ringmaster": steps(context(*overrides)),
            }
            found = in_turns(day, variants, turns, steps_each)
            for variant, times in found.items():
                rate = batch_size / statistics.median(times) * 1e3
                yield Row(f"ResNet-50 {source}, {variant}", rate, "images/s")
            speed = ratio(found["Ringmaster"], found["plain loop"])
            yield day.rated(f"ResNet-50 {source}, Ringmaster / plain loop", speed, "x", 0.97)
