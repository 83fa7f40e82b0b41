"""One run with a failure, observed from outside: its report, the time until all ended, and the restart."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.failure_parts import fault
from tests.hosts import Host
from tests.hosts import torchrun as on_host
from trainer.failures import processes
from trainer.launch.signals import stop_signals_to

PROGRAM = Path(__file__).parents[1] / "train.py"
STEP, STEPS, SAVED = 25, 44, 10  # step of the failure, steps of the run, steps between checkpoints
MARK = "RINGMASTER_DRILL"  # in the environment of every process of a drill
_OF_TORCH = ("torchelastic_", "torchinductor_")  # left by torchrun and its ranks after any run
_SPARE_S = 5.0  # allowed after timeout_s until all have ended
_DEADLINE_S = 240.0  # for a whole run, including the restart

Start = Callable[[Sequence[str], dict[str, str], Path], list[subprocess.Popen[bytes]]]
"""Starts a run, given overrides, additions to the environment, and a folder in whose files, named `output`
and so on, its output is written; one launcher and one file for each host."""


@dataclass(frozen=True)
class Case:
    strategy: str
    comm: str
    fault: str
    phase: str = "forward"
    rank: int = 1
    count: int = 1
    command: str = ""  # cuts the host off
    overrides: tuple[str, ...] = ()  # further overrides

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.comm}"

    def command_line(self, mark: Path) -> Sequence[str]:
        if self.fault == "none":
            return []
        where = (self.rank, STEP, self.phase)
        return fault(self.fault, *where, count=self.count, mark=mark, command=self.command)


@dataclass
class Outcome:
    """The outcome of a run; seconds are since the failure."""

    step: int = STEP  # step of the failure: the requested one, or the next with that phase
    report: dict[str, Any] | None = None
    report_s: float | None = None
    end_s: float | None = None
    went_on: str = "undisturbed"  # | by torchrun | by hand
    lost: int | None = None  # repeated steps
    sha256: str | None = None
    left: list[str] = field(default_factory=list)  # processes, shared memory, temporary files
    outputs: list[str] = field(default_factory=list)  # the output on each host, up to the first end

    def problems(self, case: Case, sha256: str, timeout_s: float) -> list[str]:
        """Describe what is wrong."""
        found = [] if self.sha256 == sha256 else ["another hash"]
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if case.fault == "slow":
            lines = "\n".join(self.outputs).splitlines()
            named = any(f"rank {case.rank} (" in line and "has been in" in line for line in lines)
            return found + ([] if named else ["not named as slow"]) + (["failed"] if self.report else [])
        if self.report is None:
            return [*found, "no report"]
        if self.end_s is None or self.end_s > timeout_s + _SPARE_S:
            found.append(f"not gone within {timeout_s + _SPARE_S:.0f} s")
        expected: dict[str, Any] = {"status": 3 if case.fault == "nan" else 1, "rank": case.rank}
        if case.count > 1 and self.report.get("rank") in range(case.rank, case.rank + case.count):
            del expected["rank"]
        if case.fault == "cut":  # each side names the other, and either may write last
            del expected["rank"]
            for host, said in enumerate(self.outputs):
                found += [] if f"host {1 - host} (" in said else [f"host {host} does not name the other"]
        elif case.fault not in ("nan", "diverge"):  # which are detected later than injected
            phase = "optimizer" if case.phase == "update" else case.phase
            expected |= {"step": self.step, "phase": phase}
        return found + [
            f"{key} {self.report.get(key)}, not {value}"
            for key, value in expected.items()
            if self.report.get(key) != value
        ]


def torchrun(processes: int, *options: str) -> Start:
    """Start torchrun with `options` on this machine only."""

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


def on(members: Sequence[Host], per_host: int, *options: str, conf: str = "") -> Start:
    """Restore the links, and start torchrun on each host with `options`.

    Args:
        conf: additional --rdzv-conf.
    """

    def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        launchers = []
        for host in members:
            host.link_up()
        for index, host in enumerate(members):
            command = [*on_host(members, index, per_host, conf), *options, str(PROGRAM), *overrides]
            with (folder / f"output{index}").open("ab") as file:
                launchers.append(
                    host.popen(
                        command,
                        {**environment, "GLOO_SOCKET_IFNAME": host.interface},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return launchers

    return start


def settings(case: Case, timeout_s: float) -> list[str]:
    options = [f"strategy={case.strategy}", f"comm={case.comm}", f"distributed.timeout_s={timeout_s}"]
    options += [
        "distributed.ranks_per_gpu=auto",
        f"train.max_steps={STEPS}",
        f"checkpoint.every_steps={SAVED}",
        "train.check_replicas_every=5",
    ]
    return [*options, "train.log_every_steps=5", "resume=auto", *case.overrides]


def attempt(case: Case, start: Start, folder: Path, timeout_s: float) -> Outcome:
    """Run `case` in the new directory `folder`, to the last step if possible."""
    run_dir, scratch, made = folder / "run", folder / "tmp", folder / "fault.json"
    scratch.mkdir(parents=True)
    mark = f"{os.getpid()}-{folder.name}"
    environment = {MARK: mark, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    overrides = [*settings(case, timeout_s), *case.command_line(made), f"run_dir={run_dir}"]
    outcome, pids = Outcome(), set[int]()
    with ended(launchers := start(overrides, environment, folder)):
        _follow(outcome, launchers, run_dir, made, mark, pids, until_gone=case.fault == "cut")
    outcome.outputs = _outputs(folder)
    if resumed := re.search(r"resumed from .* at step (\d+)", outcome.outputs[0]):
        outcome.went_on = "by torchrun"
        outcome.lost = max(0, outcome.step - 1 - int(resumed[1]))
    if case.fault != "none" and not (run_dir / "result.json").exists():
        outcome.went_on = "by hand"
        with ended(launchers := start(overrides, environment, folder)):
            _follow(Outcome(), launchers, run_dir, made, mark, pids)
    with contextlib.suppress(OSError, ValueError):
        outcome.sha256 = json.loads((run_dir / "result.json").read_text())["param_sha256"]
    outcome.left = [f"process {pid}" for pid in ranks_of(mark)]
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
    fault: Path,
    mark: str,
    pids: set[int],
    until_gone: bool = False,
) -> None:
    """Watch a launch until its launchers have ended, and record the times of events.

    Args:
        fault: the file that records the failure.
        pids: gets the ranks of the first attempt.
        until_gone: do not wait for launchers that wait for a lost host.
    """
    deadline = time.monotonic() + _DEADLINE_S
    made_at: float | None = None
    while time.monotonic() < deadline:
        ended = all(launcher.poll() is not None for launcher in launchers)
        if made_at is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                made = json.loads(fault.read_text())
                made_at, outcome.step = float(made["time"]), int(made["step"])
            first = {pid for pid, restarts in ranks_of(mark).items() if restarts == 0}
            pids |= first
        else:
            if outcome.report is None:
                with contextlib.suppress(OSError, ValueError):
                    written = (run_dir / "failure.json").stat().st_mtime
                    outcome.report = json.loads((run_dir / "failure.json").read_text())
                    outcome.report_s = written - made_at
            if outcome.end_s is None and not any(map(_lives, pids)):
                outcome.end_s = time.time() - made_at
        if ended or (until_gone and outcome.end_s is not None):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def by_the_door() -> Iterator[None]:
    """Raise SystemExit on a signal, so that launches are stopped and temporary directories removed."""
    received = list[int]()

    def end(number: int) -> None:
        received.append(number)
        if len(received) == 1:  # cleaning up takes time, and another signal must not interrupt it
            sys.exit(128 + number)

    with stop_signals_to(end):
        yield


@contextlib.contextmanager
def ended(launchers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop the launchers and their ranks at the end of the context, also after an error."""
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


def ranks_of(mark: str) -> dict[int, int]:
    """Return the living ranks of a drill and their data workers: pid to the number of restarts before."""
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
    return processes.state(pid) != "dead"
