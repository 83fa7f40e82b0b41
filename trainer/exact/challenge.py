"""Kills ranks, changes how many there are and their strategy: does the model still end with the same bits?

    python -m trainer.exact.challenge [--minutes 2] [--seed N] [--folder DIR]

Trains an MLP on handwritten digits with `train.exact`: undisturbed, by one process, and in moves. Each move
starts another number of ranks, with another strategy, and ends with a SIGKILL of one of them or of all; the
next goes on from what is left, and the last one to the end. The exit status is 1 if the models have different
hashes.
"""

import json
import random
import socket
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.errors import UserError
from trainer.exact.environment import environment, prepare
from trainer.launch import fresh
from trainer.launch.exits import exits
from trainer.launch.signals import stop_signals_to

LEAVES, STEPS = 8, 300
AT_LEAST, DEADLINE_S = 4, 300.0  # how many moves; for each, on a machine however slow
SETTINGS = (
    f"train.exact={LEAVES} train.log_every_steps=1 logger=jsonl resume=auto checkpoint.every_steps=25 "
    "train.eval_every_epochs=0 distributed.timeout_s=60"
)
DDP = [f"strategy=ddp comm={comm}" for comm in ("native", "ring", "tree", "halving_doubling")]


class DrawnMove(NamedTuple):
    """Ranks to start, with settings, and which of them to kill at a step; none of them: to the end."""

    ranks: int
    overrides: str
    kill_at: int = STEPS
    victims: tuple[int, ...] = ()


def run(move: DrawnMove, run_dir: Path, number: int = 0) -> None:
    """Start the ranks, kill the victims, and wait for all; UserError if some failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    told |= {"WORLD_SIZE": move.ranks, "LOCAL_WORLD_SIZE": move.ranks}
    words = [*f"{SETTINGS} train.max_steps={STEPS} {move.overrides}".split(), f"run_dir={run_dir}"]
    log, late = run_dir.with_name(f"move{number}.log"), 0
    ranks, end_by = [], time.monotonic() + DEADLINE_S
    try:
        with log.open("w") as file:
            for rank in range(move.ranks):
                own = told | {"RANK": rank, "LOCAL_RANK": rank}
                ranks.append(fresh.start(words, environment=own, devices=[], stdout=file, stderr=file))
        while (late := sum(each.poll() is None for each in ranks)) and time.monotonic() < end_by:
            if last_step(run_dir) >= move.kill_at:
                for victim in move.victims:
                    ranks[victim].kill()
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
        statuses = [process.wait() for process in ranks]
    if late or (any(statuses) and not move.victims):
        raise UserError(f"{move}: {late} late; they ended with {statuses}\n{log.read_text()[-3000:]}")


def last_step(run_dir: Path) -> int:
    """The last step in a run's metrics; 0 without one."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def next_move(draw: random.Random, step: int, moves_left: float) -> DrawnMove:
    """A move at random; with less than one left, it kills nobody and so goes to the end."""
    ranks = draw.randint(1, 4)
    words = draw.choice(DDP if LEAVES % ranks else [*DDP, *["strategy=fsdp"] * 2])
    kill_at = step + draw.randint(1, max(1, int(2 * (STEPS - step) / (moves_left + 1))))
    victims = draw.choice([tuple(range(ranks)), *((rank,) for rank in range(ranks))])
    return DrawnMove(ranks, words, kill_at, victims if moves_left >= 1 and kill_at < STEPS else ())


def challenge(minutes: float, seed: int, folder: Path) -> bool:
    """Train undisturbed, and in moves, each of which is printed; whether both models have one hash."""
    print(f"seed {seed}, in {folder}. What decides bits:", flush=True)
    prepare(torch.device("cpu"))
    print(*(f"  {name}: {value}" for name, value in environment(torch.device("cpu")).items()), sep="\n")
    alone, moved = folder / "undisturbed", folder / "moved"
    draw, begin, number, move = random.Random(seed), time.monotonic(), 0, None
    run(DrawnMove(1, "strategy=single"), alone)
    print(f"undisturbed: {STEPS} steps in {time.monotonic() - begin:.1f} s", flush=True)
    while move is None or move.victims:
        number += 1  # this move's, and how many runs there were before it
        left = number * (60 * minutes / (time.monotonic() - begin) - 1) - 1
        move = next_move(draw, last_step(moved), max(left, AT_LEAST - number))
        run(move, moved, number)
        words = f"{move.overrides} on {move.ranks} to step {last_step(moved)}"
        print(f"move {number:2d}: {words}, killed: {[*move.victims] or 'none'}", flush=True)
    first, second = (json.loads((one / "result.json").read_text())["param_sha256"] for one in (alone, moved))
    print(f"undisturbed {first}\nin moves    {second}\n{'the same' if first == second else 'OTHER'} bits")
    return bool(first == second)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="about how long it takes (2)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moves; else drawn")
    parser.add_argument("--folder", type=Path, help="of the runs and their output (runs/challenge-SEED)")
    own = parser.parse_args()
    with exits(), stop_signals_to(lambda number: sys.exit(128 + number)):  # and so kill the ranks
        folder = (own.folder or Path("runs", f"challenge-{own.seed}")).absolute()
        if (folder / "undisturbed").exists():
            raise UserError(f"{folder} has the runs of another challenge; use another --folder")
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(not challenge(own.minutes, own.seed, folder))


if __name__ == "__main__":
    main()
