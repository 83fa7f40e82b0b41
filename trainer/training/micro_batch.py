"""train.micro_batch_size=auto: the largest size that fits, found before anything is built.

A process that lacks memory may be killed by the kernel, and a rank that fails in mid-step leaves the others
waiting in a collective. So each rank starts a process that makes two steps as this rank would, among ranks
that do not exist (trainer/memory/trial_steps.py). It waits for none, and whatever ends it ends no rank; and
this process keeps its memory and its random generators as they are.
"""

import contextlib
import dataclasses
import json
import logging
import pickle
import resource
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import Config
from trainer.data.loading.batch import split_batch
from trainer.distributed.agreement import gather_objects
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.faults.processes import memory_files_of, numbers_in
from trainer.launch import fresh

log = logging.getLogger(__name__)

_SHARE = 0.9  # of the free memory; the rest is for messages of collectives, threads and fragments
_LATER = 512 << 20  # of a limit on addresses: threads, and libraries that a run loads after the search
_PATIENCE = 0.8  # of distributed.timeout_s, for which the other ranks wait


@dataclass(frozen=True)
class SizeTried:
    """What one rank found: the largest size that should fit there, and whether two steps with it do.

    A rank without an answer has found size 0.
    """

    size: int
    fits: bool
    why: str = ""
    batch_norm: bool = False


def with_micro_batch_size(config: Config, former: int | None, dist: Dist) -> Config:
    """`config` with a number for train.micro_batch_size, if it is `auto` (a collective).

    A resumed run keeps its `former` number, if that still divides what a rank has.

    The number divides the samples that a rank has of a global batch. trainer.memory predicts the largest that
    fits in 90 % of the free memory of each rank's device; while two steps with it fail on a rank, it is
    halved.

    Raises:
        UserError: not even one sample fits, or a rank does not end its steps in time.
    """
    train = config.train
    if train.micro_batch_size != "auto":
        return config
    local_size = split_batch(train.global_batch_size, None, dist.world_size).local_size
    sizes = [size for size in range(local_size, 0, -1) if local_size % size == 0]
    if former in sizes:
        return _with(config, former)
    size, notes = _largest_that_fits(config, sizes, dist)
    more = "".join(f"; {note}" for note in notes)
    log.info("train.micro_batch_size=auto: %d of the %d samples of a rank%s", size, local_size, more)
    return _with(config, size)


def _largest_that_fits(config: Config, all_sizes: list[int], dist: Dist) -> tuple[int, list[str]]:
    """One of `all_sizes`, which descend, and what the user should know of it (a collective)."""
    sizes, local_size, notes = all_sizes, all_sizes[0], list[str]()
    free = gather_objects(_free_bytes(dist))  # of all ranks, before one of them takes some
    while True:
        found = gather_objects(_try(config, dist, round(_SHARE * free[dist.rank]), sizes))
        size = min(tried.size for tried in found)
        if size == 0:
            rank = next(rank for rank, tried in enumerate(found) if tried.size == 0)
            raise UserError(
                f"train.micro_batch_size=auto: on {dist.describe(rank)} the process that makes 2 steps gives "
                f"{found[rank].why}; set a larger distributed.timeout_s, or a number"
            )
        too_large = [rank for rank, tried in enumerate(found) if not tried.fits]
        if not too_large:
            break
        first = too_large[0]
        notes.append(f"{found[first].size} failed on {dist.describe(first)} ({found[first].why})")
        most = min(size, *(found[rank].size // 2 for rank in too_large))
        sizes = [each for each in sizes if each <= most]
        if not sizes:
            raise UserError(
                f"train.micro_batch_size=auto: not even 1 sample fits; {'; '.join(notes)}. Of "
                f"{free[first] / 1e9:.3g} GB free there, {_SHARE:.0%} may be used. A smaller model or sample "
                "does, or strategy=fsdp, strategy.activation_checkpointing=true or train.precision=bf16"
            )
    if found[0].why:
        notes.append(f"not tried: {found[0].why}")
    if found[0].batch_norm and size < local_size:
        notes.append("batch norms see micro-batches, so another size makes another model")
    if size == 1 and len(all_sizes) == 2:
        divide = f"only 1 and {local_size} divide {local_size}"
        notes.append(f"{divide}, so another train.global_batch_size may be faster")
    return size, notes


@contextlib.contextmanager
def out_of_memory_explained(config: Config) -> Iterator[None]:
    """Within, an error for lack of memory gets a note that a smaller micro-batch needs less."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(
            f"train.micro_batch_size={config.train.micro_batch_size} was too large: a smaller one makes the "
            "same global batch in more parts"
        )
        raise


def _with(config: Config, size: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def _try(config: Config, dist: Dist, budget: int, sizes: list[int]) -> SizeTried:
    """The result of this rank's process, however it ends."""
    timeout_s = _PATIENCE * config.distributed.timeout_s
    world = (dist.world_size, dist.local_world_size, dist.rank)
    pipe = subprocess.PIPE
    process = fresh.start([], module="trainer.memory.trial_steps", stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        task = pickle.dumps((config, str(dist.device), world, budget, sizes))
        answers, errors = process.communicate(task, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return SizeTried(0, False, f"no answer for {timeout_s:.0f} s, 0.8 distributed.timeout_s")
    found: dict[str, Any] = {"size": sizes[-1], "fits": False}
    for line in answers.splitlines():
        found |= json.loads(line)
    if process.returncode < 0:
        found |= {"fits": False, "why": f"killed by {signal.Signals(-process.returncode).name}"}
    elif process.returncode:
        found |= {"fits": False, "why": (errors.decode().splitlines() or ["no message"])[-1]}
    return SizeTried(**found)


def _free_bytes(dist: Dist) -> int:
    """The memory that this rank may use on its device."""
    if dist.device.type == "cuda":
        return torch.cuda.mem_get_info(dist.device)[0]
    shared = [numbers_in(Path("/proc/meminfo"))["MemAvailable"] << 10, *_free_in_groups()]
    used = numbers_in(Path("/proc/self/status"))
    own = [
        resource.getrlimit(limit)[0] - (used[name] << 10) - _LATER
        for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
    ]
    return max(0, min(min(shared) // dist.local_world_size, *own, min(shared)))


def _free_in_groups() -> Iterator[int]:
    """What each control group of this process may still take; its page cache can be freed."""
    folders = {folder for file in memory_files_of("self") for folder in file.parents}
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in folders:
        for limit, used, cache in names:
            with contextlib.suppress(OSError, ValueError):  # the root has no limit; `max` is none
                taken = int((folder / used).read_text()) - numbers_in(folder / "memory.stat").get(cache, 0)
                yield int((folder / limit).read_text()) - taken
