"""Kills ranks, changes how many there are and their strategy: does the model still end with the same bits?

    python -m trainer.exact.challenge [--minutes 2] [--seed N] [--folder DIR]

Trains an MLP on handwritten digits with `train.exact`: undisturbed, by one process, and in moves. Each move
starts another number of ranks, with another strategy, and ends with a SIGKILL of one of them or of all; the
next goes on from what is left, and the last one to the end. The exit status is 1 if the models have different
hashes.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.errors import UserError
from trainer.exact.environment import environment, prepare
from trainer.launch.exits import exits
from trainer.launch.signals import stop_signals_to

LEAVES, STEPS = 8, 300
AT_LEAST = 4  # moves, on a machine however slow
DEADLINE_S = 300.0  # for one move, on a machine however slow
SETTINGS = [
    *(f"train.exact={LEAVES}", f"train.max_steps={STEPS}", "train.log_every_steps=1", "logger=jsonl"),
    *("resume=auto", "checkpoint.every_steps=25", "train.eval_every_epochs=0", "distributed.timeout_s=60"),
]
STRATEGIES = [
    *(f"strategy=ddp comm={comm}" for comm in ("native", "ring", "tree", "halving_doubling")),
    *("strategy=fsdp", "strategy=fsdp"),
]


class DrawnMove(NamedTuple):
    """Ranks to start, with settings, and the step to kill the rank `victim` at; None: all."""

    ranks: int
    overrides: str
    kill_at: int | None = None
    victim: int | None = None

    def __str__(self) -> str:
        words = self.overrides.replace("strategy=", "").replace("comm=", "")
        return f"{words} on {self.ranks}"


def run(move: DrawnMove, run_dir: Path, number: int = 0) -> None:
    """Start the ranks, kill whom the move says, and wait until all have ended.

    Raises:
        UserError: ranks failed, or had not ended in time; with the end of their output.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = run_dir.with_name(f"move{number}.log")
    told: dict[str, object] = {"WORLD_SIZE": move.ranks, "LOCAL_WORLD_SIZE": move.ranks, "MASTER_PORT": port}
    told |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    shared = os.environ | {name: str(value) for name, value in told.items()}
    command = [sys.executable, "-m", "trainer", *SETTINGS, *move.overrides.split(), f"run_dir={run_dir}"]
    ranks: list[subprocess.Popen[bytes]] = []
    kill_at, end_by = move.kill_at, time.monotonic() + DEADLINE_S
    try:
        with log.open("w") as output:
            for rank in range(move.ranks):
                own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end_by:
            if kill_at is not None and last_step(run_dir) >= kill_at:
                for victim in ranks if move.victim is None else [ranks[move.victim]]:
                    victim.kill()
                kill_at = None
            time.sleep(0.02)
    finally:
        late = sum(rank.poll() is None for rank in ranks)
        for process in ranks:
            process.kill()
        statuses = [process.wait() for process in ranks]
    if late or (move.kill_at is None and any(statuses)):
        how = f"{late} had not ended after {DEADLINE_S:g} s" if late else f"they ended with status {statuses}"
        raise UserError(f"{move}: of the ranks, {how}\n{log.read_text()[-3000:]}")


def last_step(run_dir: Path) -> int:
    """The last step in a run's metrics; 0 without one."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith(b"\n")), default=0)


def next_move(draw: random.Random, step: int, moves_left: float) -> DrawnMove:
    """A move at random; with less than one left, it has no kill and so goes to the end."""
    ranks = draw.choice((1, 2, 3, 4))
    is_shared_evenly = LEAVES % ranks == 0  # as fsdp needs
    words = draw.choice([each for each in STRATEGIES if is_shared_evenly or "fsdp" not in each])
    kill_at = step + draw.randint(1, max(1, int(2 * (STEPS - step) / (moves_left + 1))))
    victim = draw.choice([None, *range(ranks)])
    return DrawnMove(ranks, words, kill_at if moves_left >= 1 and kill_at < STEPS else None, victim)


def challenge(minutes: float, seed: int, folder: Path) -> bool:
    """Train undisturbed, and in moves, each of which is printed; whether both models have one hash."""
    print(f"seed {seed}, in {folder}. What decides bits:", flush=True)
    prepare(torch.device("cpu"))
    for name, value in environment(torch.device("cpu")).items():
        print(f"  {name}: {value}")
    end_by, draw = time.monotonic() + 60 * minutes, random.Random(seed)
    alone, moved = folder / "undisturbed", folder / "moved"
    begin = time.monotonic()
    run(DrawnMove(1, "strategy=single"), alone)
    seconds, number, move = time.monotonic() - begin, 0, None
    print(f"undisturbed: {STEPS} steps in {seconds:.1f} s", flush=True)
    while move is None or move.kill_at is not None:
        begin, number = time.monotonic(), number + 1
        move = next_move(draw, last_step(moved), max((end_by - begin) / seconds - 1, AT_LEAST - number))
        run(move, moved, number)
        seconds = (seconds + time.monotonic() - begin) / 2
        who = "all" if move.victim is None else f"rank {move.victim}"
        end = "" if move.kill_at is None else f", SIGKILL of {who}"
        print(f"move {number:2d}: {move!s:24} to step {last_step(moved):3d}{end}", flush=True)
    results = (json.loads((each / "result.json").read_text()) for each in (alone, moved))
    first, second = (result["param_sha256"] for result in results)
    print(f"undisturbed {first}\nin moves    {second}\n{'the same' if first == second else 'OTHER'} bits")
    return bool(first == second)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="about how long it takes (2)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moves; else drawn")
    parser.add_argument("--folder", type=Path, help="of the runs and their output, kept; new without one")
    arguments = parser.parse_args()
    with exits(), stop_signals_to(lambda number: sys.exit(128 + number)):  # and so kill the ranks
        folder = Path(arguments.folder or tempfile.mkdtemp(prefix="challenge-")).absolute()
        if (folder / "undisturbed").exists():
            raise UserError(f"{folder} has the runs of another challenge; use another --folder")
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(not challenge(arguments.minutes, arguments.seed, folder))


if __name__ == "__main__":
    main()
