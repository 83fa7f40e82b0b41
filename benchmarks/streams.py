"""Measure text and token data: memory for a large file, windows per second, and time of a resume.

    python -m benchmarks.streams [--gigabytes 5] [--block-size 1024] [--workers 0,1,2]

The file is sparse or, with --repeat, contains the Python language reference many times. Memory is the growth
of the resident set of a new process. A resume is timed until its first batch, both from the state of the
stream and by reading the file again.

Ringmaster's loader is compared with torch's DataLoader (`torch`), in rotation and in separate processes: for
a file of tokens read at random, and for a stream that reads the file in order. Windows per core are per
second of CPU time, including workers. The limit is one core that only copies windows of the file to int64.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainer.config import DataConfig
from trainer.data.loading.batch import split_batch
from trainer.data.loading.loaders import train_loader
from trainer.data.loading.reader import LoaderOptions
from trainer.data.text.in_memory import python_reference
from trainer.data.text.tokens import Tokens

GLOBAL_BATCH = 32
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--repeat", action="store_true", help="write the whole file instead of a sparse one")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.txt"
        _write(path, int(chosen.gigabytes * 1e9), chosen.repeat)
        print(
            f"{path.stat().st_size / 1e9:.1f} GB, windows of {chosen.block_size}, batches of {GLOBAL_BATCH}"
        )
        for what in (_print_memory, _print_resumes):
            context = multiprocessing.get_context("fork")
            process = context.Process(target=what, args=(str(path), chosen.block_size))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{what.__name__} ended with {process.exitcode}")
        _print_rates(str(path), chosen.block_size, [int(number) for number in chosen.workers.split(",")])


def _write(path: Path, num_bytes: int, repeat: bool) -> None:
    with path.open("wb") as file:
        text = python_reference().tobytes()
        while repeat and file.tell() < num_bytes:
            file.write(text)
        file.truncate(num_bytes)


def _loader(dataset: Any, workers: int = 0) -> Any:
    batch, cpu = split_batch(GLOBAL_BATCH, None, 1), torch.device("cpu")
    config = DataConfig(num_workers=workers, prefetch_factor=2, pin_memory=None, persistent_workers=True)
    config.on_bad_sample, config.sharded = "raise", False
    return train_loader(dataset, config, batch, LoaderOptions(replica=0, seed=0, device=cpu))


def _print_memory(path: str, block_size: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = _time(lambda: _loader(PlainStream(path, block_size)), 2000)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"memory     {growth:.0f} MiB of growth after 2,000 batches, {2000 / seconds:.0f} batches/s")


class PlainTokens(Dataset[Any]):
    """A typical dataset for a file of tokens."""

    def __init__(self, path: str, block_size: int) -> None:
        self._tokens, self._size = np.memmap(path, np.uint16, mode="r"), block_size

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self._size
        window = torch.from_numpy(self._tokens[begin : begin + self._size + 1].astype(np.int64))
        return window[:-1], window[1:]


class PlainStream(IterableDataset[Any]):
    """A typical dataset for a large file: each worker reads its part, and can resume there."""

    def __init__(self, path: str, block_size: int) -> None:
        self._path, self._size, self._done = path, block_size, 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._done = state["done"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with Path(self._path).open("rb") as file:
            file.seek(Path(self._path).stat().st_size // count * number + self._done * self._size)
            last = file.read(1)
            while len(text := file.read(self._size)) == self._size:
                window = torch.from_numpy(np.frombuffer(last + text, np.uint8).astype(np.int64))
                last = text[-1:]
                self._done += 1
                yield window[:-1], window[1:]


def _print_rates(path: str, block_size: int, numbers_of_workers: Sequence[int]) -> None:
    folder = Path(path).parent
    (folder / "train.bin").symlink_to(path)
    kinds: dict[str, tuple[type, Callable[[int], Iterable[Any]], Callable[[], Any], bool]] = {
        "tokens": (
            np.uint16,
            lambda workers: _loader(Tokens("train", str(folder), block_size, 50257), workers).epoch(0),
            lambda: PlainTokens(path, block_size),
            True,
        ),
        "stream": (
            np.uint8,
            lambda workers: _loader(PlainStream(path, block_size), workers).epoch(0),
            lambda: PlainStream(path, block_size),
            False,
        ),
    }
    print(f"{'windows/s':<14}{'workers':>8}{'Ringmaster':>12}{'torch':>9}{'ratio':>7}", end="")
    print(f"{'per core: Ringmaster':>23}{'torch':>9}{'ratio':>7}{'limit':>9}")
    for kind, (dtype, ringmaster, dataset, shuffles) in kinds.items():
        for workers in numbers_of_workers:

            def plain(workers: int = workers, dataset: Any = dataset, shuffles: bool = shuffles) -> Any:
                return iter(DataLoader(dataset(), GLOBAL_BATCH, shuffles, num_workers=workers))

            rows: dict[str, list[tuple[float, float]]] = {"Ringmaster": [], "torch": []}
            for _ in range(ROUNDS):
                rows["Ringmaster"].append(
                    _windows_per_s(lambda make=ringmaster, workers=workers: make(workers))
                )
                rows["torch"].append(_windows_per_s(plain))
            wall = [statistics.median(rate for rate, _ in rows[name]) for name in rows]
            core = [statistics.median(rate for _, rate in rows[name]) for name in rows]
            print(f"{kind:<14}{workers:>8}{wall[0]:>12.0f}{wall[1]:>9.0f}{wall[0] / wall[1]:>7.2f}", end="")
            print(f"{core[0]:>23.0f}{core[1]:>9.0f}{core[0] / core[1]:>7.2f}", end="")
            print(f"{_limit(path, dtype, block_size):>9.0f}")


def _windows_per_s(make: Callable[[], Iterator[Any]], num_batches: int = 1500) -> tuple[float, float]:
    """Return windows per second, and per second of CPU time, without the start-up."""
    few, many = [_seconds(make, number) for number in (50, 50 + num_batches)]
    windows = GLOBAL_BATCH * num_batches
    return windows / (many[0] - few[0]), windows / (many[1] - few[1])


def _seconds(make: Callable[[], Iterable[Any]], num_batches: int) -> tuple[float, float]:
    """Return wall and CPU seconds of a process, with its workers, that reads `num_batches` batches."""

    def take() -> None:
        torch.set_num_threads(1)
        batches = iter(make())
        for _ in range(num_batches):
            next(batches)

    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = multiprocessing.get_context("fork").Process(target=take)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"a loader ended with {process.exitcode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, used_s


def _limit(path: str, dtype: type, block_size: int) -> float:
    """Return windows per second if batches are only copied from random positions."""
    source = np.memmap(path, dtype, mode="r")
    windows = source[: len(source) // block_size * block_size].reshape(-1, block_size)
    target = np.empty((GLOBAL_BATCH, block_size), np.int64)
    rows = np.random.default_rng(0).integers(0, len(windows), (1000, GLOBAL_BATCH))
    start = time.process_time()
    for chosen in rows:
        np.copyto(target, windows[chosen])
    return rows.size / (time.process_time() - start)


def _time(make: Callable[[], Any], num_batches: int) -> float:
    batches = make().epoch(0)
    batches.take()
    start = time.perf_counter()
    for _ in range(num_batches):
        batches.take()
    return time.perf_counter() - start


def _print_resumes(path: str, block_size: int) -> None:
    writer = _loader(PlainStream(path, block_size))
    batches, num_batches = writer.epoch(0), 2000
    for _ in range(num_batches):
        batches.take()
    for name, states in (("from the state", [writer.state_dict()]), ("by reading the file again", [])):
        loader = _loader(PlainStream(path, block_size))
        loader.resume(states)
        start = time.perf_counter()
        loader.epoch(0, num_batches * GLOBAL_BATCH).take()
        seconds = time.perf_counter() - start
        print(f"resume     {name}, at sample {num_batches * GLOBAL_BATCH:,}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
