"""Cause failures at random moments, and count lost steps and runs that end differently.

Trains the MLP on the digits. Each run has up to three failures, one after another. External failures, at a
random moment: kill, pair (two ranks at once), stop, saver (a kill, and then a kill of the rank that saves),
again (a kill, and another one during the restart), cut (of the link between two hosts, until all ranks have
ended). Injected failures: update (a kill within the update), and those of tests/failure_parts.py.

After each failure, checks which rank the failure report names, compares the saved step with the last step
that any rank had finished, and verifies each checkpoint. At the end, checks the hash, the logs, and leftover
processes and files. Prints a row for each failure, and a table: the number of correct reports, which rank
saved, the number of lost steps, and the number of runs that ended with the hash of an uninterrupted run.
Restarts use the same number of ranks, because sums over fewer ranks round differently. The exit status is 1
if anything is wrong.

    python -m benchmarks.lost_steps --kinds kill,stop,update --failures 10 --worlds 2,4
    python -m benchmarks.lost_steps --kinds kill --strategies fsdp --worlds 4
    python -m benchmarks.lost_steps --kinds cut --strategies fsdp,ddp --worlds 4 --hosts 2
    python -m benchmarks.lost_steps --soak 20 --seed 7     20 minutes of random strategies, sizes and failures
    python -m benchmarks.lost_steps --case 7012            repeat a random case, by its seed

Hosts are network namespaces, which requires root. Launchers and ranks are forked from a process that has
imported everything, which needs only a fifth of the CPU time. To measure the time of a restart, use --launch
torchrun or --launch local.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import drilled_run
from benchmarks.faulty_case import INJECTED, OUTSIDE, STRATEGIES, Case, Failure, Row, table
from benchmarks.faulty_run import STEPS, FaultyRun
from tests.forked import Forked
from tests.hosts import Host, hosts

RESTARTS = 6
PHASES = ("data", "forward", "backward", "all_reduce", "optimizer", "evaluate")
_ONE_PROCESS = ("single", "dp")


class CaseRunner:
    """Runs cases, remembers the hashes of uninterrupted runs, and prints the results."""

    def __init__(
        self,
        start_on: Callable[[int], drilled_run.Start],
        folder: Path,
        pair: Sequence[Host],
        known: Path | None,
    ) -> None:
        self.start_on, self.folder, self.pair = start_on, folder, pair
        self.rows = list[Row]()
        self._hashes: dict[str, str | None] = {}
        if known is not None and known.exists():
            self._hashes = json.loads(known.read_text())
        self._known = known
        self._number = 0

    def run_case(self, case: Case) -> None:
        if case.name not in self._hashes:
            self._hashes[case.name], _ = self._run(Case(case.strategy, case.world, (), 0))
            if self._known is not None:
                self._known.write_text(json.dumps(self._hashes))
        try:
            sha256, rows = self._run(case)
        except (TimeoutError, OSError) as error:
            row = Row(case, "+".join(failure.kind for failure in case.failures), problems=[repr(error)])
            sha256, rows = self._hashes[case.name], [row]
        for row in rows:
            row.same = sha256 is not None and sha256 == self._hashes[case.name]
        self.rows += rows
        print("\n".join(map(str, rows)), flush=True)
        if not all(row.is_correct for row in rows):
            print(f"    see {self.folder / str(self._number)}", flush=True)

    def _run(self, case: Case) -> tuple[str | None, list[Row]]:
        self._number += 1
        return FaultyRun(case, self.start_on(case.world), self.folder / str(self._number), self.pair).finish()

    def table(self) -> bool:
        """Print the table, and return whether everything is right."""
        rows = [row for row in self.rows if "missed" not in row.kind]
        print("\n".join(table(rows)), flush=True)
        return all(row.is_correct for row in rows)


def case_of_kind(kind: str, strategy: str, world: int, count: int, seed: int) -> Case:
    """Return a run with up to three failures of a kind, or with one if it is injected."""
    draw = random.Random(seed)
    once = kind == "cut" or kind in INJECTED
    steps = sorted(draw.sample(range(5, STEPS - 40), 1 if once else count))
    return Case(
        strategy, world, tuple(Failure(kind, step, rank=draw.randrange(world)) for step in steps), seed
    )


def random_case(seed: int) -> Case:
    """Return a random case, for --soak."""
    draw = random.Random(seed)
    strategy = draw.choice([*STRATEGIES, "ddp", "fsdp"])
    world = 1 if strategy in _ONE_PROCESS else 4 if strategy == "hybrid" else draw.choice((2, 3, 4))
    steps = sorted(draw.sample(range(3, STEPS - 40), draw.choice((1, 2, 3))))
    failures = []
    for number, step in enumerate(steps):
        kinds = [*OUTSIDE[:-1], *([] if number else INJECTED * 2)]
        if world == 1:
            kinds = [kind for kind in kinds if kind not in ("pair", "stop", "saver", "hang")]
        kind = draw.choice([kind for kind in kinds if world > 2 or kind not in ("pair", "saver")])
        phases = [phase for phase in PHASES if world > 1 or phase != "all_reduce"]
        phase = "update" if kind == "update" else draw.choice(phases)
        if strategy == "servers" and phase in ("update", "all_reduce"):
            kind, phase = "raise" if kind == "update" else kind, "forward"
        if kind == "nan" and phase == "evaluate":  # NaN in an evaluation does not stop the run
            phase = "forward"
        failures.append(Failure(kind, step, phase, draw.randrange(world)))
    return Case(strategy, world, tuple(failures), seed)


def main(argv: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="kill", help=f"from {','.join([*OUTSIDE, *INJECTED])}")
    parser.add_argument("--strategies", default="ddp", help=f"from {','.join(STRATEGIES)}")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument(
        "--failures",
        type=int,
        default=10,
        help="number of failures of each kind, over all strategies and worlds",
    )
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--case", type=int, metavar="SEED")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--launch", choices=("forked", "torchrun", "local"), default="forked")
    parser.add_argument(
        "--known", type=Path, help="file with hashes of uninterrupted runs, read and extended"
    )
    parser.add_argument("--out", type=Path, help="folder for the runs")
    arguments = parser.parse_args(argv)
    with drilled_run.exit_on_signals(), contextlib.ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lost_steps-")))
        forked = Forked(stack)
        pair = stack.enter_context(hosts(2)) if arguments.hosts == 2 else []

        def start_on(world: int) -> drilled_run.Start:
            restarts = f"--max-restarts={RESTARTS}"
            if pair:
                return forked.on_hosts(pair, world // 2, restarts)
            if arguments.launch == "forked":
                return forked.torchrun(world, restarts)
            return drilled_run.torchrun(world, restarts) if arguments.launch == "torchrun" else local(world)

        runner = CaseRunner(start_on, folder, pair, arguments.known)
        if arguments.case is not None:
            runner.run_case(random_case(arguments.case))
        elif arguments.soak:
            end, seed = time.monotonic() + 60 * arguments.soak, 1000 * arguments.seed
            while time.monotonic() < end:
                runner.run_case(random_case(seed := seed + 1))
        else:
            worlds = [
                (s, int(w)) for s in arguments.strategies.split(",") for w in arguments.worlds.split(",")
            ]
            for kind in arguments.kinds.split(","):
                left, seed = arguments.failures, 1000 * arguments.seed
                while left > 0:
                    strategy, world = worlds[seed % len(worlds)]
                    case = case_of_kind(kind, strategy, world, min(left, 3), seed := seed + 1)
                    runner.run_case(case)
                    left -= sum("missed" not in row.kind for row in runner.rows[-len(case.failures) :])
        return runner.table()


def local(world: int) -> drilled_run.Start:
    """Return a function that starts runs with launch=local."""

    def start(words: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        options = ["launch=local", f"launch.processes={world}", f"launch.max_restarts={RESTARTS}"]
        with (folder / "output").open("ab") as file:
            command = [sys.executable, str(drilled_run.PROGRAM), *words, *options]
            variables = {**os.environ, **environment}
            return [
                subprocess.Popen(
                    command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            ]

    return start


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
