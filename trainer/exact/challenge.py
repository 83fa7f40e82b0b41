"""Kills ranks, changes how many there are and their strategy: does the model still end with the same bits?

    python -m trainer.exact.challenge [--minutes 2] [--seed N] [--folder DIR]
    torchrun --nnodes=2 --nproc-per-node=1 ... -m trainer.exact.challenge --folder DIR

Trains an MLP on handwritten digits with `train.exact`: undisturbed, by one process, and in moves. Each move
starts another number of ranks, with another strategy, and ends with a SIGKILL of one of them or of all; the
next goes on from what is left, and the last one to the end. The exit status is 1 if the models have different
hashes. Under torchrun, each process starts the ranks of its host, and all hosts must see DIR.
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
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


class HostDriver:
    """This process as the driver of one host's ranks; without torchrun, the only one."""

    def __init__(self) -> None:
        self.count, self.number = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if self.count > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=2 * DEADLINE_S))

    def all(self, value: Any) -> list[Any]:
        """Every host's `value` (a collective)."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def agreed(self, value: Any) -> Any:
        """The first host's `value` (a collective)."""
        return self.all(value)[0]

    def say(self, line: str) -> None:
        if self.number == 0:
            print(line, flush=True)


class DrawnMove(NamedTuple):
    """Ranks to start on each host, with settings, and the step to kill the rank `victim` at; None: all."""

    ranks: Sequence[int]
    overrides: str
    kill_at: int | None = None
    victim: int | None = None

    def __str__(self) -> str:
        words = self.overrides.replace("strategy=", "").replace("comm=", "")
        return f"{words} on {' + '.join(map(str, self.ranks))}"


def run(hosts: HostDriver, move: DrawnMove, run_dir: Path, number: int = 0) -> None:
    """Start this host's ranks, kill whom the move says, and wait until all have ended (a collective).

    Raises:
        UserError: ranks failed, or had not ended in time; with the end of their output.
    """
    with socket.create_server(("", 0)) as free:
        port = hosts.agreed(free.getsockname()[1])
    first, here = sum(move.ranks[: hosts.number]), move.ranks[hosts.number]
    log = run_dir.with_name(f"move{number}.host{hosts.number}.log")
    shared = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": hosts.address}
    numbers = {"MASTER_PORT": port, "WORLD_SIZE": sum(move.ranks), "LOCAL_WORLD_SIZE": here}
    shared |= {name: str(value) for name, value in {**numbers, "GROUP_RANK": hosts.number}.items()}
    command = [sys.executable, "-m", "trainer", *SETTINGS, *move.overrides.split(), f"run_dir={run_dir}"]
    ranks: list[subprocess.Popen[bytes]] = []
    kill_at, end_by = move.kill_at, time.monotonic() + DEADLINE_S
    try:
        with log.open("w") as output:
            for local in range(here):
                own = shared | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end_by:
            if kill_at is not None and last_step(run_dir) >= kill_at:
                for rank in [rank for n, rank in enumerate(ranks, first) if move.victim in (None, n)]:
                    rank.kill()
                kill_at = None
            time.sleep(0.02)
    finally:
        late = sum(rank.poll() is None for rank in ranks)
        for rank in ranks:
            rank.kill()
        statuses = [rank.wait() for rank in ranks]
    how = f"{late} had not ended after {DEADLINE_S:g} s" if late else f"they ended with status {statuses}"
    told = f"{move}: of the ranks on host {hosts.number}, {how}\n{log.read_text()[-3000:]}"
    wrong = hosts.all(told if late or (move.kill_at is None and any(statuses)) else None)
    if any(wrong):
        raise UserError("\n".join(filter(None, wrong)))


def last_step(run_dir: Path) -> int:
    """The last step in a run's metrics; 0 without one."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith(b"\n")), default=0)


def next_move(draw: random.Random, hosts: int, step: int, moves_left: float) -> DrawnMove:
    """A move at random; with less than one left, it has no kill and so goes to the end."""
    ranks = [draw.choice([size for size in (1, 2, 3, 4) if size == 1 or size * hosts <= 4])] * hosts
    is_shared_evenly = LEAVES % sum(ranks) == 0  # as fsdp needs
    words = draw.choice([each for each in STRATEGIES if is_shared_evenly or "fsdp" not in each])
    kill_at = step + draw.randint(1, max(1, int(2 * (STEPS - step) / (moves_left + 1))))
    victim = draw.choice([None, *range(sum(ranks))])
    return DrawnMove(ranks, words, kill_at if moves_left >= 1 and kill_at < STEPS else None, victim)


def challenge(hosts: HostDriver, minutes: float, seed: int, folder: Path) -> bool:
    """Train undisturbed, and in moves, each of which is printed; whether both models have one hash."""
    hosts.say(f"seed {seed}, in {folder}. What decides bits:")
    prepare(torch.device("cpu"))
    for name, value in environment(torch.device("cpu")).items():
        hosts.say(f"  {name}: {value}")
    end_by, draw = time.monotonic() + 60 * minutes, random.Random(seed)
    alone, moved = folder / "undisturbed", folder / "moved"
    begin = time.monotonic()
    run(hosts, DrawnMove([1] + [0] * (hosts.count - 1), "strategy=single"), alone)
    seconds, number, move = time.monotonic() - begin, 0, None
    hosts.say(f"undisturbed: {STEPS} steps in {seconds:.1f} s")
    while move is None or move.kill_at is not None:
        begin, number, step = time.monotonic(), number + 1, hosts.agreed(last_step(moved))
        moves_left = hosts.agreed(max((end_by - begin) / seconds - 1, AT_LEAST - number))
        move = next_move(draw, hosts.count, step, moves_left)
        run(hosts, move, moved, number)
        seconds = (seconds + time.monotonic() - begin) / 2
        who = "all" if move.victim is None else f"rank {move.victim}"
        end = "" if move.kill_at is None else f", SIGKILL of {who}"
        hosts.say(f"move {number:2d}: {move!s:24} to step {last_step(moved):3d}{end}")
    results = (json.loads((each / "result.json").read_text()) for each in (alone, moved))
    first, second = (result["param_sha256"] for result in results)
    hosts.say(f"undisturbed {first}\nin moves    {second}\n{'the same' if first == second else 'OTHER'} bits")
    return bool(first == second)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="about how long it takes (2)")
    parser.add_argument("--seed", type=int, help="of the moves; drawn without one")
    parser.add_argument("--folder", type=Path, help="of the runs and their output, kept; new without one")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < float("inf"):
        parser.error(f"--minutes {arguments.minutes}: must be a positive number")
    with exits(), stop_signals_to(lambda number: sys.exit(128 + number)):  # and so kill the ranks
        hosts = HostDriver()
        if hosts.count > 1 and arguments.folder is None:
            raise UserError("the hosts need --folder, a directory that all of them see")
        seed = hosts.agreed(random.randrange(10**6) if arguments.seed is None else arguments.seed)
        folder = Path(arguments.folder or tempfile.mkdtemp(prefix="challenge-")).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_used = hosts.agreed((folder / "undisturbed").exists())  # a host may be slow to look
        except OSError as error:
            raise UserError(f"--folder {folder} cannot be used: {error.strerror}") from error
        if is_used:
            raise UserError(f"{folder} has the runs of another challenge; use another --folder")
        sys.exit(not challenge(hosts, arguments.minutes, seed, folder))


if __name__ == "__main__":
    main()
