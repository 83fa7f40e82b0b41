"""One worker three times as slow as the others: parameter servers, synchronous, bounded and asynchronous.

    python -m benchmarks.straggler [--steps 300] [--workers 3] [--pace-ms 20] [--data digits text]

A forward pass takes `--pace-ms` (sleeping, so that few cores suffice) and on the last rank three times as
long. Prints samples per second, and the mean training loss after equal steps and after the time of the
fastest mode.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from models.gpt import GPT
from models.mlp import MLP
from tests.ranks import run_ranks
from tests.runs import train

MODES = ("0", "2", "8", "inf")
_HERE = "model._target_=benchmarks.straggler"
SETTINGS = {
    "digits": ("data=digits", f"{_HERE}.PacedMlp", "model.hidden=[64]", "optim.lr=0.05"),
    "text": (
        "data=text", "data.dataset.block_size=32", "model=gpt", f"{_HERE}.PacedGpt", "model.width=32",
        "model.depth=2", "model.num_heads=2", "optim=adamw", "optim.lr=0.003",
    ),
}  # fmt: skip


def pause() -> None:
    slow = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    time.sleep(float(os.environ["PACE_MS"]) / 1e3 * (3 if slow else 1))


class PacedMlp(MLP):
    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            pause()
        return super().forward(images)


class PacedGpt(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            pause()
        return super().forward(tokens)


def run_each(root: str, data: str, steps: int) -> list[list[dict[str, Any]]]:
    """The logged values of each mode."""
    found = []
    for mode in MODES:
        run_dir = f"{root}/{data}-{mode}"
        train(
            *SETTINGS[data],
            "strategy=parameter_server",
            f"strategy.max_staleness={mode}",
            "schedule=constant",
            "train.epochs=10000",
            f"train.max_steps={steps}",
            "train.global_batch_size=48",
            "train.log_every_steps=20",
            "train.eval_every_epochs=0",
            "checkpoint.every_epochs=null",
            f"run_dir={run_dir}",
        )
        found.append(
            [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
        )
    return found


def curve(logged: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, seconds since the beginning, mean loss of the last steps)."""
    points, seconds, before = [], 0.0, 0
    for line in logged:
        if "train/loss" in line:
            seconds += (line["step"] - before) * line["speed/ms_per_step/step"] / 1e3
            before = line["step"]
            points.append((before, seconds, line["train/loss"]))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--data", nargs="+", choices=SETTINGS, default=["digits", "text"])
    args = parser.parse_args()
    for data in args.data:
        with tempfile.TemporaryDirectory() as root:
            logged = run_ranks(
                run_each, args.workers + 1, root, data, args.steps,
                init=False, env={"PACE_MS": str(args.pace_ms)}, timeout_s=1200,
            )[0]  # fmt: skip
        curves = dict(zip(MODES, map(curve, logged), strict=True))
        shortest = min(points[-1][1] for points in curves.values())
        print(f"{data}: 1 server, {args.workers} workers, the last one slow; {args.steps} steps of 48")
        print(
            f"{'max_staleness':<15}{'samples/s':>10}{'loss':>9}{f'loss at {shortest:.0f} s':>15}{'stale':>7}"
        )
        for (mode, points), lines in zip(curves.items(), logged, strict=True):
            step, seconds, loss = points[-1]
            in_time = [point for point in points if point[1] <= shortest + 1e-6]
            late = next(
                (line["ps/staleness/mean"] for line in reversed(lines) if "ps/staleness/mean" in line), 0
            )
            print(
                f"{mode:<15}{48 * step / seconds:>10.0f}{loss:>9.4f}"
                f"{in_time[-1][2] if in_time else float('nan'):>15.4f}{late:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
