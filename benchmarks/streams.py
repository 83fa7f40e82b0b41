"""The cost of a stream: memory on a large file, windows per second compared with text in memory, and a
resume.

    python -m benchmarks.streams [--gigabytes 5] [--block-size 1024]

The file is sparse or, with --repeat, the Python language reference written over and over. Memory is the
growth of the resident set of a fresh process; a resume is timed to its first batch, from the stream's own
state and by reading again.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.data.loading.base import Share
from trainer.data.loading.batch import split_batch
from trainer.data.loading.loaders import train_loader
from trainer.data.text.in_memory import Text, python_reference
from trainer.data.text.stream import TextStream

GLOBAL_BATCH = 32
ROUNDS = 3


@dataclass
class Settings:
    sharded: bool
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    persistent_workers: bool = True
    on_bad_sample: str = "raise"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--repeat", action="store_true", help="write the file out in full")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.txt"
        _write(path, int(chosen.gigabytes * 1e9), chosen.repeat)
        print(
            f"{path.stat().st_size / 1e9:.1f} GB, windows of {chosen.block_size}, batches of {GLOBAL_BATCH}"
        )
        for what in (_memory, _rates, _resumes):
            context = multiprocessing.get_context("fork")
            process = context.Process(target=what, args=(str(path), chosen.block_size))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{what.__name__} ended with {process.exitcode}")


def _write(path: Path, num_bytes: int, repeat: bool) -> None:
    with path.open("wb") as file:
        text = python_reference().tobytes()
        while repeat and file.tell() < num_bytes:
            file.write(text)
        file.truncate(num_bytes)


def _loader(dataset: Any, sharded: bool = True) -> Any:
    batch, cpu = split_batch(GLOBAL_BATCH, None, 1), torch.device("cpu")
    return train_loader(dataset, Settings(sharded), batch, Share(replica=0, seed=0, device=cpu))


def _memory(path: str, block_size: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = _time(lambda: _loader(TextStream("train", path, block_size)), 2000)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"memory     {grown:.0f} MiB over base after 2,000 batches, {2000 / seconds:.0f} batches/s")


def _rates(path: str, block_size: int) -> None:
    """In rotation, so that both see the same load."""
    streams, in_memory = [], []
    for _ in range(ROUNDS):
        streams.append(_time(lambda: _loader(TextStream("train", path, block_size)), 500))
        in_memory.append(_time(lambda: _loader(Text("train", None, block_size), sharded=False), 10) * 50)
    rate = GLOBAL_BATCH * 500 / min(streams)
    print(f"reading    {rate:.0f} windows/s, {min(streams) / min(in_memory):.2f} x the time of data=text")


def _time(make: Callable[[], Any], num_batches: int) -> float:
    batches = make().epoch(0)
    next(batches)
    began = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return time.perf_counter() - began


def _resumes(path: str, block_size: int) -> None:
    writer = _loader(TextStream("train", path, block_size))
    batches, num_batches = writer.epoch(0), 2000
    for _ in range(num_batches):
        next(batches)
    for name, states in (("from its state", [writer.state_dict()]), ("by reading again", [])):
        loader = _loader(TextStream("train", path, block_size))
        loader.resume(states)
        began = time.perf_counter()
        next(loader.epoch(0, num_batches * GLOBAL_BATCH))
        seconds = time.perf_counter() - began
        print(f"resume     {name}, at sample {num_batches * GLOBAL_BATCH:,}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
