"""Two real steps of one rank of a run, alone: started by trainer/training/micro_batch.py.

Reads a pickled (config, device, (world, ranks a host, rank), bytes, sizes) from standard input, and writes
JSON lines to standard output: {"size": ..., "batch_norm": ...}, the largest size that should fit, and
{"fits": ..., "why": ...}. An error other than a lack of memory is told under `why`, and `fits` is true: the
run will meet it where it can explain it.
"""

import functools
import json
import os
import pickle
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config import Config
from trainer.errors import first_line
from trainer.faults.processes import numbers_in
from trainer.launch.fresh import die_with_parent, extend_path
from trainer.memory.dry_run import STATE, DryRun, Footprint
from trainer.memory.fit import largest_micro_batch_size
from trainer.memory.pretend import DryRunWorld

_NO_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread", "could not create a memory")


def main() -> None:
    die_with_parent()
    extend_path()
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what user code prints is not an answer

        def answer(**found: Any) -> None:
            answers.write(json.dumps(found) + "\n")

        config, device, world, num_bytes, sizes = pickle.load(sys.stdin.buffer)
        try:
            trial = TrialSteps(config, torch.device(device), DryRunWorld(*world), num_bytes)
            size, footprint = trial.predicted(sizes)
            answer(size=size, batch_norm=trial.has_batch_norm)
            trial.make(size, sizes[0], footprint)
            answer(fits=True)
        except Exception as error:
            cause = error.__cause__ or error
            lacks = isinstance(cause, MemoryError | torch.OutOfMemoryError) or any(
                words in str(cause) for words in _NO_MEMORY
            )
            answer(fits=not lacks, why="out of memory" if lacks else first_line(error))


class TrialSteps:
    """The steps of a rank of `config`'s run on `device`, which may take `num_bytes` there."""

    def __init__(self, config: Config, device: torch.device, world: DryRunWorld, num_bytes: int) -> None:
        self._config, self._device, self._world = config, device, world
        before = _data_bytes()
        self._dry_run = DryRun(config)
        self._left = num_bytes
        if device.type == "cpu":
            self._left -= _data_bytes() - before
        self.has_batch_norm = self._dry_run.has(_BatchNorm)

    def predicted(self, sizes: Sequence[int]) -> tuple[int, Footprint | None]:
        """The largest of `sizes`, which descend, that should fit, or the last, and its footprint.

        Without a prediction, as for a model that reads its numbers, the first.
        """
        try:
            with self._dry_run.under(self._config, self._world) as stage:
                peak = functools.cache(lambda size: self._bytes(stage.footprint(size, 2)))
                fits_whole = peak(sizes[0]) <= self._left
                found = sizes[0] if fits_whole else largest_micro_batch_size(peak, self._left, 1)
                size = next((size for size in sizes if size <= found), sizes[-1])
                return size, stage.footprint(size, 2)
        except Exception:  # of a model that reads numbers, or takes memory as if there were some
            return sizes[0], None

    def make(self, size: int, most: int, footprint: Footprint | None) -> None:
        """Make two steps with micro-batches of `size`. Raises what torch raises if they do not fit.

        Args:
            most: the size that has all samples of the rank; of others a step adds several.
            footprint: as `predicted` gave it.
        """
        self._limit()
        beside = torch.empty(self._beside(footprint) if footprint else 0, dtype=torch.uint8)
        with self._dry_run.for_real(self._config, self._world, self._device) as stage:
            stage.steps(self._dry_run.batch(size), 1 if size == most else 2)
        del beside

    def _bytes(self, footprint: Footprint) -> int:
        return footprint.peak + self._beside(footprint)

    def _beside(self, footprint: Footprint) -> int:
        """Copies of the state in the memory of the device, if that is the host's."""
        if self._device.type != "cpu":
            return 0
        state = sum(footprint.parts[kind] for kind in STATE)
        return footprint.host + state * self._config.checkpoint.async_

    def _limit(self) -> None:
        """More memory than `num_bytes` fails from now on, in place of starting to swap."""
        if self._device.type == "cuda":
            total = torch.cuda.mem_get_info(self._device)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._left / total), self._device)
        else:
            resource.setrlimit(
                resource.RLIMIT_DATA,
                (_data_bytes() + max(0, self._left), resource.getrlimit(resource.RLIMIT_DATA)[1]),
            )


def _data_bytes() -> int:
    """The memory of this process that is its own and can be written, touched or not."""
    return numbers_in(Path("/proc/self/status"))["VmData"] << 10


if __name__ == "__main__":
    main()
