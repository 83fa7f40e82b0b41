"""Check that `train.exact` gives the same bits when ranks are killed and their number and strategy change.

    python -m trainer.exact.challenge [--minutes 2] [--seed N] [--folder DIR] [--device cuda]

The program trains an MLP on handwritten digits twice: without interruption in one process, and in parts
called legs. Each leg starts a random number of ranks with a random strategy, and ends with a SIGKILL to one
rank or to all ranks. The next leg resumes from the last checkpoint, and the last leg trains to the end. The
exit status is 1 if the two models have different hashes.
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
from trainer.launch import new_process
from trainer.launch.exits import exits
from trainer.launch.signals import stop_signals_to

CHUNKS, STEPS = 8, 300
MIN_LEGS, DEADLINE_S = 4, 300.0  # the deadline is for each leg, on a slow machine
SETTINGS = (
    f"train.exact={CHUNKS} train.log_every_steps=1 logger=jsonl resume=auto checkpoint.every_steps=25 "
    "train.eval_every_epochs=0 distributed.timeout_s=60 distributed.ranks_per_gpu=auto"
)
DDP = [f"strategy=ddp comm={comm}" for comm in ("native", "ring", "tree", "halving_doubling")]


class Leg(NamedTuple):
    """A part of a run: the number of ranks, their settings, and the ranks to kill at a step (if any)."""

    ranks: int
    overrides: str
    kill_at: int = STEPS
    victims: tuple[int, ...] = ()


def run(leg: Leg, run_dir: Path, number: int = 0, device: str = "cpu") -> None:
    """Start the ranks, kill the victims, and wait until all ranks end. Raise UserError if the leg fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    variables |= {"WORLD_SIZE": leg.ranks, "LOCAL_WORLD_SIZE": leg.ranks}
    settings = f"{SETTINGS} train.max_steps={STEPS} distributed.device={device} {leg.overrides}"
    overrides = [*settings.split(), f"run_dir={run_dir}"]
    log, num_alive = run_dir.with_name(f"leg{number}.log"), 0
    ranks, deadline = [], time.monotonic() + DEADLINE_S
    try:
        with log.open("w") as file:
            for rank in range(leg.ranks):
                own = variables | {"RANK": rank, "LOCAL_RANK": rank}
                ranks.append(new_process.start(overrides, environment=own, stdout=file, stderr=file))
        while (num_alive := sum(each.poll() is None for each in ranks)) and time.monotonic() < deadline:
            if last_step(run_dir) >= leg.kill_at:
                for victim in leg.victims:
                    ranks[victim].kill()
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
        statuses = [process.wait() for process in ranks]
    if num_alive or (any(statuses) and not leg.victims):
        late = f" after {DEADLINE_S:.0f} s, when {num_alive} ranks were still alive," if num_alive else ""
        raise UserError(f"{leg} failed{late} with exit statuses {statuses}\n{log.read_text()[-3000:]}")


def last_step(run_dir: Path) -> int:
    """Return the last step in a run's metrics; 0 if there is none."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def next_leg(draw: random.Random, step: int, legs_left: float) -> Leg:
    """Return a random leg. If less than one leg is left, it has no victims and trains to the end."""
    ranks = draw.randint(1, 4)
    overrides = draw.choice(DDP if CHUNKS % ranks else [*DDP, *["strategy=fsdp"] * 2])
    kill_at = step + draw.randint(1, max(1, int(2 * (STEPS - step) / (legs_left + 1))))
    victims = draw.choice([tuple(range(ranks)), *((rank,) for rank in range(ranks))])
    return Leg(ranks, overrides, kill_at, victims if legs_left >= 1 and kill_at < STEPS else ())


def challenge(minutes: float, seed: int, folder: Path, device: str = "cpu") -> bool:
    """Train without interruption and in legs, print each leg, and return whether the hashes are equal."""
    print(f"seed {seed}, folder {folder}; environment:", flush=True)
    prepare(torch.device(device))
    print(*(f"  {name}: {value}" for name, value in environment(torch.device(device)).items()), sep="\n")
    run_dirs = folder / "uninterrupted", folder / "interrupted"
    draw, start, number, leg = random.Random(seed), time.monotonic(), 0, None
    run(Leg(1, "strategy=single"), run_dirs[0], device=device)
    print(f"uninterrupted: {STEPS} steps in {time.monotonic() - start:.1f} s", flush=True)
    while leg is None or leg.victims:
        number += 1  # of this leg, and at the same time the number of runs before it
        left = number * (60 * minutes / (time.monotonic() - start) - 1) - 1
        leg = next_leg(draw, last_step(run_dirs[1]), max(left, MIN_LEGS - number))
        run(leg, run_dirs[1], number, device)
        summary = f"{leg.overrides} on {leg.ranks} to step {last_step(run_dirs[1])}"
        print(f"leg {number:2d}: {summary}, killed: {[*leg.victims] or 'none'}", flush=True)
    first, second = (json.loads((path / "result.json").read_text())["param_sha256"] for path in run_dirs)
    print(f"uninterrupted {first}\ninterrupted   {second}\n{'same' if first == second else 'DIFFERENT'} bits")
    return bool(first == second)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="approximate duration (2)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of the legs (random)")
    parser.add_argument("--folder", type=Path, help="folder of the runs and logs (runs/challenge-SEED)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="ranks share the GPUs (cpu)")
    options = parser.parse_args()
    with exits(), stop_signals_to(lambda number: sys.exit(128 + number)):  # and so kill the ranks
        folder = (options.folder or Path("runs", f"challenge-{options.seed}")).absolute()
        if (folder / "uninterrupted").exists():
            raise UserError(f"{folder} contains the runs of another challenge; use another --folder")
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(not challenge(options.minutes, options.seed, folder, options.device))


if __name__ == "__main__":
    main()
