"""Every fault in turn, on this machine: what is said, how soon all is over, and whether the run goes on.

Trains the MLP on the embedded digits under torchrun with --max-restarts=1, as a user would, once undisturbed
and once for each fault, and prints a table with a row for each. `right` says whether failure.json names the
rank, the phase and the step of the fault; the seconds are those from the fault to the verdict, and until each
process of that attempt was gone. Exit status 1 if any row is not as it should be.

    python -m trainer.faults.drill
    python -m trainer.faults.drill --strategies ddp --comm ring --faults kill,stop --phase all_reduce
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.faults.rehearsal import MARKER

FAULTS = ("kill", "stop", "raise", "hang", "exit", "slow", "nan", "diverge")
PROGRAM = Path(__file__).parents[2] / "train.py"
STEP, STEPS, SAVED = 25, 44, 10  # of the fault, of a run, from one checkpoint to the next
MARK = "RINGMASTER_DRILL"  # in the environment of every process of a drill
_OF_TORCH = ("torchelastic_", "torchinductor_")  # left by torchrun and its ranks after any run
_SPARE_S = 5.0  # beyond timeout_s, for all to be gone
_DEADLINE_S = 240.0  # for a run as a whole, restart included

Start = Callable[[Sequence[str], dict[str, str], Path], list[subprocess.Popen[bytes]]]
"""Starts a run, given overrides, what to add to the environment, and where to append what is printed to files
named `output` and so on; one launcher and one file per host."""


@dataclass(frozen=True)
class Case:
    strategy: str
    comm: str
    fault: str
    phase: str = "forward"
    rank: int = 1
    overrides: tuple[str, ...] = ()  # more of them

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.comm}"

    def command_line(self) -> list[str]:
        if self.fault == "none":
            return [f"fault={self.fault}"]
        who = [] if self.fault == "cut" else [f"fault.rank={self.rank}"]
        return [f"fault={self.fault}", *who, f"fault.step={STEP}", f"fault.phase={self.phase}"]


@dataclass
class Outcome:
    """What became of a run; seconds are from the fault on."""

    verdict: dict[str, Any] | None = None
    verdict_s: float | None = None
    end_s: float | None = None
    went_on: str = "undisturbed"  # | by torchrun | by hand
    sha256: str | None = None
    left: list[str] = field(default_factory=list)  # processes, shared memory, temporary files
    outputs: list[str] = field(default_factory=list)  # what was printed on each host, up to the first end

    def problems(self, case: Case, sha256: str, timeout_s: float) -> list[str]:
        """What is not as it should be, in words."""
        found = [] if self.sha256 == sha256 else ["another hash"]
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if case.fault == "slow":
            lines = "\n".join(self.outputs).splitlines()
            named = any(f"rank {case.rank} (" in line and "has been in" in line for line in lines)
            return found + ([] if named else ["not named as slow"]) + (["failed"] if self.verdict else [])
        if self.verdict is None:
            return [*found, "no verdict"]
        if self.end_s is None or self.end_s > timeout_s + _SPARE_S:
            found.append(f"not gone within {timeout_s + _SPARE_S:.0f} s")
        expected: dict[str, Any] = {"status": 3 if case.fault == "nan" else 1, "rank": case.rank}
        if case.fault == "cut":  # each side names the other; which wrote last is chance
            del expected["rank"]
            near, far = self.outputs
            found += [] if "host 1 (" in near and "host 0 (" in far else ["the other side not named"]
        elif case.fault not in ("nan", "diverge"):  # which are found later than they are made
            expected |= {"step": STEP, "phase": case.phase}
        return found + [
            f"{key} {self.verdict.get(key)}, not {value}"
            for key, value in expected.items()
            if self.verdict.get(key) != value
        ]


def torchrun(processes: int, *options: str) -> Start:
    """On this machine alone, with `options` of torchrun's."""

    def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
        command += [*options, f"--nproc_per_node={processes}", str(PROGRAM), *overrides]
        with (folder / "output").open("ab") as file:
            return [
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ]

    return start


def settings(case: Case, timeout_s: float) -> list[str]:
    options = [f"strategy={case.strategy}", f"comm={case.comm}", f"distributed.timeout_s={timeout_s}"]
    options += [f"train.max_steps={STEPS}", f"checkpoint.every_steps={SAVED}", "train.check_replicas_every=5"]
    return [*options, "train.log_every_steps=5", "resume=auto", *case.overrides]


def attempt(case: Case, start: Start, folder: Path, timeout_s: float) -> Outcome:
    """Run `case` in the new directory `folder`, to the last step if that can be."""
    run_dir, scratch = folder / "run", folder / "tmp"
    scratch.mkdir(parents=True)
    mark = f"{os.getpid()}-{folder.name}"
    environment = {MARK: mark, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    overrides = [*settings(case, timeout_s), *case.command_line(), f"run_dir={run_dir}"]
    outcome, pids = Outcome(), set[int]()
    with ended(launchers := start(overrides, environment, folder)):
        _follow(outcome, launchers, run_dir, mark, pids, until_gone=case.fault == "cut")
    outcome.outputs = _outputs(folder)
    if "resumed from" in outcome.outputs[0]:
        outcome.went_on = "by torchrun"
    if case.fault != "none" and not (run_dir / "result.json").exists():
        outcome.went_on = "by hand"
        with ended(launchers := start(overrides, environment, folder)):
            _follow(Outcome(), launchers, run_dir, mark, pids)
    with contextlib.suppress(OSError, ValueError):
        outcome.sha256 = json.loads((run_dir / "result.json").read_text())["param_sha256"]
    outcome.left = [f"process {pid}" for pid in processes(mark)]
    outcome.left += [path.name for path in scratch.iterdir() if not path.name.startswith(_OF_TORCH)]
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    outcome.left += [name for name in names if any(f"_{pid}_" in name for pid in pids)]
    return outcome


def _outputs(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(folder.glob("output*"))]


def _follow(
    outcome: Outcome,
    launchers: list[subprocess.Popen[bytes]],
    run_dir: Path,
    mark: str,
    pids: set[int],
    until_gone: bool = False,
) -> None:
    """Watch a launch until its launchers have ended, and note when what was to be seen.

    Args:
        pids: those of the ranks that the fault met are added.
        until_gone: do not wait for launchers that wait for a host that is lost.
    """
    deadline = time.monotonic() + _DEADLINE_S
    made_at: float | None = None
    while time.monotonic() < deadline:
        ended = all(launcher.poll() is not None for launcher in launchers)
        if made_at is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                made_at = float(json.loads((run_dir / MARKER).read_text())["time"])
            first = {pid for pid, restarts in processes(mark).items() if restarts == 0}
            pids |= first
        else:
            if outcome.verdict is None:
                with contextlib.suppress(OSError, ValueError):
                    written = (run_dir / "failure.json").stat().st_mtime
                    outcome.verdict = json.loads((run_dir / "failure.json").read_text())
                    outcome.verdict_s = written - made_at
            if outcome.end_s is None and not any(map(_lives, pids)):
                outcome.end_s = time.time() - made_at
        if ended or (until_gone and outcome.end_s is not None):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def ended(launchers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever happens, the launchers are gone afterwards, and with them their ranks."""
    try:
        yield
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            try:
                launcher.wait(45)  # torchrun gives its ranks 30 s
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def processes(mark: str) -> dict[int, int]:
    """The ranks of a drill and their data workers that live, with the number of restarts before each."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _lives(int(folder.name)):
            with contextlib.suppress(OSError):  # it may end at any moment
                entries = (folder / "environ").read_bytes().split(b"\0")
                variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
                if variables.get(MARK.encode()) == mark.encode() and b"RANK" in variables:
                    found[int(folder.name)] = int(variables.get(b"TORCHELASTIC_RESTART_COUNT", b"0"))
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def cases(strategies: Sequence[str], comms: Sequence[str], faults: Sequence[str], phase: str) -> list[Case]:
    """Undisturbed first, for each strategy and all-reduce."""
    found = []
    for strategy in strategies:
        for comm in comms if strategy == "ddp" else ["native"]:
            found.append(Case(strategy, comm, "none"))
            # A shard has no replica to differ from.
            kinds = [fault for fault in faults if strategy == "ddp" or fault != "diverge"]
            found += [Case(strategy, comm, fault, phase) for fault in kinds]
    return found


HEADER = (
    f"{'':<16} {'fault':<8} {'right':<6} {'verdict s':>9} {'gone s':>7}  {'went on':<12} {'equal':<6} notes"
)


def row(case: Case, outcome: Outcome, problems: Sequence[str], equal: bool) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    wrong = [problem for problem in problems if problem != "another hash"]
    times = f"{seconds(outcome.verdict_s):>9} {seconds(outcome.end_s):>7}"
    went_on = f"{outcome.went_on:<12} {'yes' if equal else 'no':<6}"
    right = "no" if wrong else "yes"
    return f"{case.name:<16} {case.fault:<8} {right:<6} {times}  {went_on} {'; '.join(wrong)}".rstrip()


def drill(
    todo: Sequence[Case], start: Start, folder: Path, timeout_s: float = 10.0
) -> list[tuple[Case, list[str]]]:
    """Run the cases, print a row for each as it is done; return what went wrong in which.

    Args:
        todo: for each strategy and all-reduce the undisturbed run comes first.
        timeout_s: `distributed.timeout_s` of the runs.
    """
    wrong, hashes = [], dict[str, str]()
    print(HEADER, flush=True)
    for number, case in enumerate(todo):
        here = folder / f"{number:02d}-{case.strategy}-{case.comm}-{case.fault}"
        outcome = attempt(case, start, here, timeout_s)
        if case.fault == "none":
            if outcome.sha256 is None:
                raise RuntimeError("the undisturbed run failed:\n" + outcome.outputs[0][-3000:])
            hashes[case.name] = outcome.sha256
            print(f"{case.name:<16} none     {outcome.sha256[:12]}", flush=True)
            continue
        problems = outcome.problems(case, hashes[case.name], timeout_s)
        print(row(case, outcome, problems, outcome.sha256 == hashes[case.name]), flush=True)
        if problems:
            wrong.append((case, problems))
            print(f"    see {here}", file=sys.stderr, flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default="ddp,fsdp")
    parser.add_argument("--comm", default="native,ring,hierarchical", help="for ddp")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--phase", default="forward", help="in which the fault is made")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=10.0, help="distributed.timeout_s of the runs")
    parser.add_argument("--out", type=Path, help="where the runs and what they print are kept")
    arguments = parser.parse_args()
    strategies, comms = arguments.strategies.split(","), arguments.comm.split(",")
    faults = arguments.faults.split(",")
    for name, given, known in (("--strategies", strategies, ("ddp", "fsdp")), ("--faults", faults, FAULTS)):
        for value in given:
            if value not in known:
                parser.error(f"{name}: {value} is not one of {', '.join(known)}")
    if arguments.processes < 2:
        parser.error(
            f"--processes is {arguments.processes}, but a rank that fails needs others who see it: 2"
        )
    with contextlib.ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        todo = cases(strategies, comms, faults, arguments.phase)
        wrong = drill(todo, torchrun(arguments.processes), folder, arguments.timeout_s)
    num_faults = sum(case.fault != "none" for case in todo)
    print(f"{num_faults - len(wrong)} of {num_faults} as they should be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
