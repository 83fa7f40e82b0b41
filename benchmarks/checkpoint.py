"""What a checkpoint costs, beside plain `torch.save` + fsync and plain DCP of the same state.

    python benchmarks/checkpoint.py [--gigabytes 1.0] [--rounds 5] [--directory DIR]

Each round times every way once, so that a busy machine slows all of them; the ratios are those of the medians.
"""

import argparse
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
from torch import nn

from trainer.checkpoint import Checkpointer
from trainer.checkpoint.store import Store, verify
from trainer.checkpoint.tree import take_apart
from trainer.config import CheckpointConfig
from trainer.distributed import Dist
from trainer.state import Progress, TrainState

WIDTH = 2048


def build_state(gigabytes: float) -> TrainState:
    """A model of square layers with AdamW's two moments: a third of ``gigabytes`` each."""
    num_layers = max(1, round(gigabytes * 1e9 / 3 / (WIDTH * WIDTH * 4)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return TrainState(model, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False), Progress())


def checkpointer(run_dir: Path, format: str, async_: bool) -> Checkpointer:
    settings = CheckpointConfig(
        format=format, every_steps=1, every_epochs=None, keep_last=1, keep_best=None, keep_every=None,
        async_=async_, timeout_s=600.0,
    )  # fmt: skip
    dist = Dist(0, 0, 1, 1, (0,), torch.device("cpu"), "gloo")
    return Checkpointer(settings, run_dir, dist, strategy="single", config={})


def torch_save(state: TrainState, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(take_apart(state.state_dict())[0], file)
        file.flush()
        os.fsync(file.fileno())


def timed(action: Callable[[], object]) -> float:
    os.sync()  # nobody pays for what another left behind
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(state: TrainState, root: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; a round before the first is thrown away."""
    full, sharded = (checkpointer(root / name, name, async_=False) for name in ("full", "sharded"))
    in_background = checkpointer(root / "async", "full", async_=True)
    times: dict[str, list[float]] = {}

    def save(through: Checkpointer) -> None:
        through.save(state)

    for number in range(rounds + 1):
        state.progress.step = number + 1
        torch_file, dcp_directory = root / "torch.pt", root / "dcp"
        ways: dict[str, Callable[[], object]] = {
            "torch.save + fsync": lambda path=torch_file: torch_save(state, path),  # type: ignore[misc]
            "full": lambda: save(full),
            "plain DCP": lambda path=dcp_directory: dcp.save(  # type: ignore[misc]
                take_apart(state.state_dict())[0], checkpoint_id=path
            ),
            "sharded": lambda: save(sharded),
            "verify full": lambda: verify(Store(root / "full" / "checkpoints").path(state.progress.step)),
            "async stall": lambda: save(in_background),
            "async rest": in_background.close,
        }
        for name, action in ways.items():
            seconds = timed(action)
            if number > 0:
                times.setdefault(name, []).append(seconds)
            else:
                times.setdefault(f"{name} (first)", []).append(seconds)
        torch_file.unlink()
        shutil.rmtree(dcp_directory)
    return times


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    arguments = parser.parse_args()
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    state = build_state(arguments.gigabytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        times = measure(state, Path(root), arguments.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    save_ratio = medians["full"] / medians["torch.save + fsync"]
    for name, values in times.items():
        print(f"{name:28s} {medians[name]:7.3f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    print(f"full / (torch.save + fsync)  {save_ratio:7.2f}     (at most 1.5)")
    print(f"sharded / plain DCP          {medians['sharded'] / medians['plain DCP']:7.2f}")
    print(f"verify, s per GB             {medians['verify full'] / arguments.gigabytes:7.2f}     (at most 1)")
    print(f"async stall / full           {medians['async stall'] / medians['full']:7.2f}     (at most 0.10)")
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
