"""Measure how many photographs per second are loaded into batches, and which stage is the bottleneck.

    python -m benchmarks.image_loading [--images 256] [--rounds 5] [--workers 0,1,2]

Creates JPEG files of 500 x 375 pixels, about 90 kB each, and loads them as data=imagefolder does in training:
a random crop resized to 224 pixels, as uint8. First measures the stages for one image in one process. Then
compares Ringmaster's loader with torch's DataLoader, torchvision's ImageFolder and the usual transforms,
which normalise on the CPU and return floats; the two alternate. Times are those of the fastest round, because
other load on the machine only makes rounds slower. The files are in the page cache; a disk may be slower.
"""

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import datasets
from torchvision.transforms import v2

from trainer.config import DataConfig
from trainer.data.device import Normalise, ToDevice
from trainer.data.imagefolder import MEAN, STD, ImageFolder
from trainer.data.loading.batch import split_batch
from trainer.data.loading.loaders import train_loader
from trainer.data.loading.reader import LoaderOptions

WIDTH, HEIGHT, SIZE, BATCH = 500, 375, 224, 64


def write_photographs(root: Path, count: int) -> None:
    """Write images of smooth colours with some noise, whose size is similar to that of photographs."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        folder = root / split / "things"
        folder.mkdir(parents=True)
        for number in range(count if split == "train" else 1):
            coarse = Image.fromarray(generator.integers(0, 256, (15, 20, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
            noisy = smooth + generator.normal(0, 12, smooth.shape)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)


def stage_times(files: list[Path], rounds: int) -> dict[str, float]:
    """Return the time per image, in ms, of each stage."""
    crop = v2.RandomResizedCrop(SIZE)
    to_bytes = v2.PILToTensor()
    to_floats = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    read = [file.read_bytes() for file in files]
    decoded = [Image.open(io.BytesIO(data)).convert("RGB") for data in read]
    cropped = [crop(image) for image in decoded]
    tensors = [to_bytes(image) for image in cropped]
    normalise = Normalise(MEAN, STD, torch.device("cpu"))
    batch = default_collate(tensors[:BATCH])
    stages: dict[str, tuple[Callable[[], object], int]] = {
        "read the file": (lambda: [file.read_bytes() for file in files], len(files)),
        "decode": (lambda: [Image.open(io.BytesIO(data)).convert("RGB") for data in read], len(files)),
        "crop and resize": (lambda: [crop(image) for image in decoded], len(files)),
        "convert to a uint8 tensor": (lambda: [to_bytes(image) for image in cropped], len(files)),
        "collate": (lambda: default_collate(tensors[:BATCH]), len(batch)),
        "(normalise batches, on the device)": (lambda: normalise(batch), len(batch)),
        "(normalise images, on the host)": (
            lambda: [to_floats(tensor) for tensor in tensors],
            len(files),
        ),
    }
    return {
        name: 1e3 * min(_seconds(action) for _ in range(rounds)) / count
        for name, (action, count) in stages.items()
    }


def loaders(root: Path, workers: int) -> dict[str, Callable[[], Iterable[object]]]:
    options = LoaderOptions(replica=0, seed=0, device=torch.device("cpu"))
    config = DataConfig(num_workers=workers, prefetch_factor=2, pin_memory=None, persistent_workers=True)
    config.on_bad_sample, config.sharded = "raise", False
    ringmaster = train_loader(
        ImageFolder("train", str(root), SIZE), config, split_batch(BATCH, None, 1), options
    )
    to_device = ToDevice(torch.device("cpu"), False, Normalise(MEAN, STD, torch.device("cpu")))
    usual = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    torchvision: DataLoader[object] = DataLoader(
        datasets.ImageFolder(root / "train", usual),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return {"Ringmaster": lambda: map(to_device, ringmaster.epoch(0)), "torchvision": lambda: torchvision}


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default=",".join(map(str, range((os.cpu_count() or 1) + 1))))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root, max(arguments.images, BATCH))
        files = sorted((root / "train/things").iterdir())
        kilobytes = sum(file.stat().st_size for file in files) / len(files) / 1e3
        print(f"{len(files)} files of {WIDTH} x {HEIGHT}, {kilobytes:.0f} kB each, {os.cpu_count()} cores")
        parts = stage_times(files, arguments.rounds)
        whole = sum(ms for name, ms in parts.items() if not name.startswith("("))
        for name, ms in parts.items():
            fraction = "" if name.startswith("(") else f"{ms / whole:6.0%}"
            print(f"  {name:<36}{ms:8.3f} ms{fraction}")
        slowest = max((name for name in parts if not name.startswith("(")), key=lambda name: parts[name])
        print(f"one core: at most {1e3 / whole:.0f} images/s; the slowest stage is: {slowest}")
        print(f"{'workers':>8}{'Ringmaster':>14}{'torchvision':>14}{'ratio':>8}    images/s")
        for workers in map(int, arguments.workers.split(",")):
            epochs = loaders(root, workers)
            seconds: dict[str, list[float]] = {name: [] for name in epochs}
            for _ in range(arguments.rounds):
                for name, epoch in epochs.items():
                    seconds[name].append(_seconds(lambda epoch=epoch: [None for _ in epoch()]))  # type: ignore[misc]
            count = len(files) // BATCH * BATCH
            ringmaster, torchvision = (count / min(each) for each in seconds.values())
            print(f"{workers:>8}{ringmaster:>14.0f}{torchvision:>14.0f}{ringmaster / torchvision:>8.2f}")


if __name__ == "__main__":
    main()
