"""Kill saves at random moments, and check that the newest checkpoint is complete and not too old.

Two ranks save without a pause; every value of the state is the number of the step. Both get SIGKILL at a
random moment. Then the newest checkpoint that resume=auto finds must be intact, contain the same step in all
its tensors, and not be older than the last save that returned. Prints a line for each checkpoint format; the
exit status is 1 if a checkpoint was damaged or lost.

    python -m benchmarks.torn_saves [--kills 60] [--gigabytes 0.05] [--directory DIR]
"""

import argparse
import itertools
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.checkpoint import build_state
from tests.checkpoint import tiny
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, verified
from trainer.checkpoint.store import Store
from trainer.checkpoint.tree import take_apart
from trainer.errors import UserError
from trainer.tensors.local_shard import to_local

FORMATS: dict[str, dict[str, Any]] = {
    "full": {"format": "full"},
    "sharded": {"format": "sharded"},
    "sharded async": {"format": "sharded", "async_": True},
}
_RANKS = 2


def save_forever(rank: int, root: Path, format: str, gigabytes: float, done: Any) -> None:
    store = torch_dist.FileStore(str(root / "store"), _RANKS)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    state = build_state(gigabytes, lambda model: fully_shard(model, mesh=mesh))
    checkpointer = tiny.checkpointer(root, keep_last=1, state=state, **FORMATS[format])
    for step in itertools.count(1):
        checkpointer.saving.wait_until_copied()
        with torch.no_grad():
            for tensor in take_apart(state.state_dict())[0].values():
                to_local(tensor).fill_(step)
        state.progress.step = step
        checkpointer.save(state)
        if rank == 0:
            done.value = step - 1 if "async" in format else step  # this save has waited for the previous one


def newest_intact(root: Path) -> OpenCheckpoint | None:
    store = Store(root / "checkpoints", "tiny")
    store.recover()
    for directory in store.own():
        try:
            return verified(directory)
        except UserError as error:
            print(f"  skipped: {error}")
    return None


def problem_after_kill(root: Path, format: str, gigabytes: float, draw: random.Random) -> str | None:
    done = multiprocessing.Value("q", 0)
    ranks = [
        multiprocessing.Process(target=save_forever, args=(rank, root, format, gigabytes, done))
        for rank in range(_RANKS)
    ]
    for rank in ranks:
        rank.start()
    while done.value < 2:
        time.sleep(0.01)
        assert all(rank.is_alive() for rank in ranks), "a rank ended before the kill"
    time.sleep(draw.uniform(0, 1))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    source = newest_intact(root)
    if source is None:
        return "no checkpoint is intact"
    step = source.progress.step
    if step < done.value:
        return f"the newest checkpoint is of step {step}, but step {done.value} was saved"
    mixed = [name for name, tensor in source.read().items() if not bool((tensor == step).all())]
    return f"step {step} contains {mixed[0]} of another step" if mixed else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--gigabytes", type=float, default=0.05)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that forked processes lack no threads
    draw, problems = random.Random(options.seed), 0
    for format in FORMATS:
        found = []
        for _ in range(options.kills // len(FORMATS)):
            root = Path(tempfile.mkdtemp(dir=options.directory))
            found.append(problem_after_kill(root, format, options.gigabytes, draw))
            shutil.rmtree(root)
        bad = [each for each in found if each is not None]
        problems += len(bad)
        print(
            f"{format:14} {len(found) - len(bad)} of {len(found)} complete checkpoints",
            *bad,
            sep="\n  ",
            flush=True,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")  # import torch only once
    sys.exit(main())
