"""Compare the time of a checkpoint with `torch.save` + fsync, torch's DCP and safetensors' save_file.

    python benchmarks/checkpoint.py [--gigabytes 1.0] [--rounds 5] [--directory DIR]

Each round times every method once. Ratios are between medians. The load of the machine is printed too,
because without a free core hashing adds to the time of writing. "first" is an additional first round, which
also allocates memory. Then measures the wall time and CPU time of a save when eight checkpoints of 1 TB, with
long manifests, are kept.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.manifest import BLOCK_BYTES, FileDigest, verify
from trainer.checkpoint.open_checkpoint import verified
from trainer.checkpoint.store import Store
from trainer.checkpoint.tree import take_apart
from trainer.config import CheckpointConfig
from trainer.distributed.ranks import Ranks
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import Progress, TrainState

WIDTH, BATCH = 2048, 256


def build_state(gigabytes: float, shard: Callable[[nn.Module], object] = lambda model: None) -> TrainState:
    """Return a model of square layers and AdamW's two moments, each a third of ``gigabytes``."""
    num_layers = max(1, round(gigabytes * 1e9 / 3 / (WIDTH * WIDTH * 4)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    shard(model)
    trainable = TrainableParameters(model)
    optimizer = torch.optim.AdamW(trainable.own.values())
    for own in trainable.own.values():
        own.grad = torch.rand_like(own)
    optimizer.step()
    optimizer.zero_grad()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return TrainState(trainable, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False), Progress())


def checkpointer(state: TrainState, run_dir: Path, format: str, async_: bool) -> Checkpointer:
    settings = CheckpointConfig(
        format=format, every_steps=1, every_minutes=None, every_epochs=None, keep_last=1,
        keep_best=None, keep_every=None, async_=async_, timeout_s=600.0,
    )  # fmt: skip
    ranks = Ranks(0, 0, 1, 1, (0,), torch.device("cpu"), "gloo")
    config = {"strategy.name": "single"}
    made = Checkpointer(settings, run_dir, ranks, run_id="benchmark", num_samples=1, config=config)
    made.bind(state)
    return made


def torch_save(state: TrainState, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(take_apart(state.state_dict())[0], file)
        file.flush()
        os.fsync(file.fileno())


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compute(state: TrainState) -> None:
    """Run the forward and backward pass of a step."""
    state.model(torch.ones(BATCH, WIDTH)).sum().backward()
    state.optimizer.zero_grad()


def measure(state: TrainState, root: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each method in each round; the first, which allocates memory, is separate."""
    full, sharded = (checkpointer(state, root / name, name, async_=False) for name in ("full", "sharded"))
    in_background = checkpointer(state, root / "async", "full", async_=True)
    torch_file, dcp_directory, safe_file = root / "torch.pt", root / "dcp", root / "safe.safetensors"
    targets = {name: torch.empty_like(value) for name, value in take_apart(state.state_dict())[0].items()}

    def async_stall() -> float:
        """Return how long training waits: for the call and, before the update, for the rest of the copy."""
        seconds = timed(lambda: in_background.save(state))
        compute(state)
        return seconds + timed(in_background.saving.wait_until_copied)

    ways: dict[str, Callable[[], float]] = {
        "torch.save + fsync": lambda: timed(lambda: torch_save(state, torch_file)),
        "full": lambda: timed(lambda: full.save(state)),
        "plain DCP": lambda: timed(
            lambda: dcp.save(take_apart(state.state_dict())[0], checkpoint_id=dcp_directory)
        ),
        "sharded": lambda: timed(lambda: sharded.save(state)),
        "safetensors": lambda: timed(lambda: save_file(take_apart(state.state_dict())[0], safe_file)),
        "plain dcp.load": lambda: timed(lambda: dcp.load(targets, checkpoint_id=dcp_directory)),
        "resume sharded": lambda: timed(
            lambda: verified(max((root / "sharded" / "checkpoints").iterdir())).read_into(targets)
        ),
        "verify full": lambda: timed(lambda: verify(max((root / "full" / "checkpoints").iterdir()))),
        "async stall": async_stall,
        "rest of async save": lambda: timed(in_background.saving.wait),
    }
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        state.progress.step = number + 1
        for name, action in ways.items():
            os.sync()  # a method must not wait for the writes of another
            times.setdefault(name if number else f"{name} (first)", []).append(action())
        torch_file.unlink()
        safe_file.unlink()
        shutil.rmtree(dcp_directory)
        for path in root.glob("*/checkpoints/step_*"):
            shutil.rmtree(path)
    return times


def save_with_long_manifests(root: Path, rounds: int) -> list[tuple[float, float]]:
    """Return wall and CPU seconds of an empty save when eight checkpoints of 1 TB from 64 ranks are kept.

    The first pair is for a new process.
    """
    blocks = round(1e12 / BLOCK_BYTES / 128)
    hashes = tuple(hashlib.sha256(b"%d" % number).hexdigest() for number in range(blocks))
    names = [f"{kind}-{rank:05d}-of-00064.safetensors" for rank in range(64) for kind in ("model", "optim")]
    digests = dict.fromkeys(names, FileDigest(blocks * BLOCK_BYTES, hashes))
    found = []
    store = Store(root, "benchmark")
    for step in range(9 + rounds):
        if step == 8:
            store = Store(root, "benchmark")  # like in a new process
        marks = [(time.perf_counter(), time.process_time())]
        directory = store.new_directory(step)
        marks.append((time.perf_counter(), time.process_time()))
        for name in names:
            (directory / name).touch()
        marks.append((time.perf_counter(), time.process_time()))
        store.commit(step, "sharded", digests, "branch")
        store.prune(CheckpointConfig(keep_last=8, keep_best=None, keep_every=None), Evaluations(root))
        marks.append((time.perf_counter(), time.process_time()))
        begin, listed, filled, end = marks
        found.append((end[0] - filled[0] + listed[0] - begin[0], end[1] - filled[1] + listed[1] - begin[1]))
    return found[8:]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="folder for the files (a temporary folder)")
    arguments = parser.parse_args()
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    state = build_state(arguments.gigabytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        times = measure(state, Path(root), arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        long = save_with_long_manifests(Path(root), arguments.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:28s} {medians[name]:7.3f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    for words, ratio, most in (
        ("full / (torch.save + fsync)", medians["full"] / medians["torch.save + fsync"], 1.15),
        ("sharded / plain DCP", medians["sharded"] / medians["plain DCP"], 0.8),
        ("resume sharded / dcp.load", medians["resume sharded"] / medians["plain dcp.load"], 1.5),
        ("verify, s per GB", medians["verify full"] / arguments.gigabytes, 0.5),
        ("async stall / full", medians["async stall"] / medians["full"], 0.05),
        ("8 manifests of 1 TB, s", statistics.median(wall for wall, _ in long[1:]), 0.05),
        ("  CPU time, s", statistics.median(cpu for _, cpu in long[1:]), 0.05),
    ):
        print(f"{words:28s} {ratio:7.3f}     (limit {most})")
    print(f"{'  in a new process, s':28s} {long[0][0]:7.3f}     load {os.getloadavg()[0]:.1f}")
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
