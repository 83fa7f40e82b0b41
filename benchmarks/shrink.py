"""Check that the survivors continue under distributed.shrink when a rank dies or hangs.

Trains the MLP on the digits with launch=local, on 3 and 4 ranks and with several all-reduces, with a failure
of a rank in each phase of a step. Prints a row for each: the time from the failure to the end of the next
step, the number of lost steps, and whether the model has the expected hash. With train.exact, that is the
hash of an uninterrupted single process; without it, the hash of a restart on the same number of ranks from
the same step. With --hosts 2, hosts are network namespaces with one torchrun each, which requires root, and
the second host is lost with all its processes. The exit status is 1 if anything is wrong.

    python -m benchmarks.shrink [--only kill|twice|stop|hang|plain] [--hosts 2]
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.drilled_run import stopping
from tests.failure_parts import inject
from tests.forked import Forked
from tests.hosts import hosts
from tests.programs import Program, started

STEPS, STEP = 60, 20
DEADLINE_S = 120.0  # for one run
PHASES = ("data", "forward", "backward", "all_reduce", "optimizer", "update", "evaluate", "checkpoint")
COMMS = ("native", "ring", "hierarchical")
SETTINGS = [
    *("strategy=ddp", "distributed.shrink=true", "distributed.timeout_s=8", f"train.max_steps={STEPS}"),
    *("train.global_batch_size=48", "train.log_every_steps=1", "logger=jsonl", "checkpoint.keep_last=100"),
    *("checkpoint.every_steps=7", "train.eval_every_epochs=1"),
]


class Case(NamedTuple):
    ranks: int
    comm: str
    kind: str
    phase: str
    victim: int
    exact: bool = True
    again: bool = False  # a second failure follows, of the lowest surviving rank

    def __str__(self) -> str:
        exact = "exact" if self.exact else "plain"
        kind = f"{self.kind} twice" if self.again else self.kind
        return f"{self.ranks} ranks  {self.comm:12}  {exact}  {kind:10}  rank {self.victim}  {self.phase:10}"


def cases(only: str) -> Iterator[Case]:
    for number, phase in enumerate(PHASES):
        for ranks in (3, 4) if only in ("kill", "all") else ():
            every = ranks == 3 or phase in ("backward", "all_reduce")
            for comm in COMMS if every else (COMMS[number % 3],):
                yield Case(ranks, comm, "kill", phase, (number + ranks + COMMS.index(comm)) % ranks)
    if only in ("twice", "all"):
        yield from (Case(4, comm, "kill", "backward", 0, again=True) for comm in COMMS)
    for kind in ("stop", "hang") if only == "all" else {"stop", "hang"} & {only}:
        yield from (Case(3, comm, kind, "forward", number) for number, comm in enumerate(COMMS))
    if only in ("plain", "all"):
        yield from (Case(4, comm, "kill", "forward", 1, exact=False) for comm in COMMS)


class CaseRunner:
    """Runs cases, and compares their hashes with the expected ones."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number, self._exact_hash = folder, 0, ""

    def run_case(self, case: Case) -> bool:
        """Run a case, print its row, and return whether everything is correct."""
        self._number += 1
        run_dir, mark = self._folder / str(self._number), self._folder / f"{self._number}.mark"
        command_line = [*overrides(case, mark), f"run_dir={run_dir}"]
        with started(
            "train.py", *command_line, f"launch.processes={case.ranks}", "launch=local", forks=True
        ) as program:
            if case.again:
                kill_again(program, run_dir)
            end = program.wait(DEADLINE_S)
        return self.check(case, run_dir, mark, end.output if end.code else "")

    def check(self, case: Case, run_dir: Path, mark: Path, failed: str = "") -> bool:
        if failed or not (run_dir / "result.json").exists():
            print(f"{case}  FAILED\n{failed[-3000:]}", flush=True)
            return False
        seconds, step, lost = time_to_continue(run_dir, json.loads(mark.read_text())["time"])
        left = world_size(run_dir)
        is_right = hash_of(run_dir) == (
            self._exact() if case.exact else self._restarted(case, run_dir, step, left)
        )
        words = f"{seconds:5.2f} s  continues from step {step} on {left} ranks, {lost} steps lost"
        print(f"{case}  {words}  {'same' if is_right else 'DIFFERENT'} bits", flush=True)
        return is_right and not lost

    def _exact(self) -> str:
        """Return the hash of an uninterrupted single process."""
        if not self._exact_hash:
            self._exact_hash = self._finished(
                "uninterrupted", "strategy=single", "distributed.shrink=false", "train.exact=8"
            )
        return self._exact_hash

    def _restarted(self, case: Case, run_dir: Path, step: int, left: int) -> str:
        """Return the hash of a restart with `left` ranks."""
        start = run_dir / "checkpoints" / f"step_{step:08d}"
        more = (f"comm={case.comm}", f"resume={start}", "launch=local", f"launch.processes={left}")
        return self._finished(f"{run_dir.name}.restarted", *more)

    def _finished(self, name: str, *more: str) -> str:
        run_dir = self._folder / name
        with started("train.py", *SETTINGS, f"run_dir={run_dir}", *more, forks=True) as program:
            end = program.wait(DEADLINE_S)
            assert end.code == 0, end.output
        return hash_of(run_dir)


def overrides(case: Case, mark: Path) -> list[str]:
    command_line = inject(case.kind, case.victim, STEP, case.phase, mark=mark)
    return [*SETTINGS, f"comm={case.comm}", *(["train.exact=8"] if case.exact else []), *command_line]


def kill_again(launcher: Program, run_dir: Path) -> None:
    """Kill the lowest surviving rank after the survivors have made a step."""
    end_by = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_by and launcher.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            after = (run_dir / "train.log").read_text().split("without a restart")[1]
            if re.search(r"step \d+/", after):
                os.kill(launcher.ranks()[0], signal.SIGKILL)
                return
        time.sleep(0.02)


def time_to_continue(run_dir: Path, failed_at_s: float) -> tuple[float, int, int]:
    """Return the seconds until the end of the next step, the saved step, and the number of lost steps.

    The log is read; the seconds count from the failure.
    """
    before, _, after = (run_dir / "train.log").read_text().partition("without a restart")
    logged = max(int(step) for step in re.findall(r" step (\d+)/", before))
    resumed = int(re.findall(r"at step (\d+)", after)[0])
    line = next(line for line in after.splitlines() if re.search(r" step \d+/", line))
    at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return at - failed_at_s, resumed, max(0, logged - resumed)


def world_size(run_dir: Path) -> int:
    return int(json.loads((run_dir / "result.json").read_text())["world_size"])


def hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


def lose_a_host(runner: CaseRunner, folder: Path) -> list[bool]:
    """Run with two ranks on each of two hosts; kill all processes of the second, including its torchrun."""
    found = []
    for number, comm in enumerate(COMMS * 2):
        case = Case(4, comm, "cut", "forward" if number < 3 else "backward", 2)
        with hosts(2) as pair, contextlib.ExitStack() as stack:
            here = folder / f"hosts{number}"
            here.mkdir()
            kill = f"ip netns pids {pair[1].name} | xargs kill -9"
            command_line = [*SETTINGS, f"comm={comm}", "train.exact=8", f"run_dir={here / 'run'}"]
            command_line += inject("cut", 2, STEP, case.phase, mark=here / "mark", command=kill)
            launchers = Forked(stack).on_hosts(pair, 2)(command_line, {"OMP_NUM_THREADS": "1"}, here)
            end_by = time.monotonic() + DEADLINE_S
            with stopping(launchers):
                while not (here / "run" / "result.json").exists() and time.monotonic() < end_by:
                    if launchers[0].poll() is not None:
                        break
                    time.sleep(0.1)
            outputs = "\n".join(file.read_text() for file in sorted(here.glob("output*")))
        lost = "" if (here / "run" / "result.json").exists() else outputs
        found.append(runner.check(case, here / "run", here / "mark", lost))
    return found


def main(argv: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="all", choices=("all", "kill", "twice", "stop", "hang", "plain"))
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shrink-") as folder:
        runner = CaseRunner(Path(folder))
        if arguments.hosts == 2:
            right = lose_a_host(runner, Path(folder))
        else:
            right = [runner.run_case(case) for case in cases(arguments.only)]
    print(
        f"{sum(right)} of {len(right)} cases continued without a lost step and ended with the expected hash"
    )
    return all(right)


if __name__ == "__main__":
    sys.exit(not main())
