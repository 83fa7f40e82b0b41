"""Run a training with one failure, and observe its report, the end of its processes, and its restart."""

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

from tests.failure_parts import inject
from tests.hosts import Host
from tests.hosts import torchrun as on_host
from trainer.failures import processes
from trainer.launch.signals import stop_signals_to

PROGRAM = Path(__file__).parents[1] / "train.py"
STEP, STEPS, SAVED = 25, 44, 10  # step of the failure, steps of the run, steps between checkpoints
MARK = "RINGMASTER_DRILL"  # in the environment of every process of a drill
_TORCH_FOLDERS = ("torchelastic_", "torchinductor_")  # temporary folders that torch never removes
_SPARE_S = 5.0  # time after timeout_s in which all processes must end
_DEADLINE_S = 240.0  # for a run including its restart

Start = Callable[[Sequence[str], dict[str, str], Path], list[subprocess.Popen[bytes]]]
"""Starts a run, given overrides, additional environment variables, and a folder for its output. Returns a
launcher for each host, which writes to a file `output*` in the folder."""


@dataclass(frozen=True)
class Case:
    strategy: str
    comm: str
    failure: str
    phase: str = "forward"
    rank: int = 1
    count: int = 1
    command: str = ""  # disconnects the host
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.comm}"

    def command_line(self, mark: Path) -> Sequence[str]:
        if self.failure == "none":
            return []
        where = (self.rank, STEP, self.phase)
        return inject(self.failure, *where, count=self.count, mark=mark, command=self.command)


@dataclass
class Outcome:
    """The outcome of a run; seconds are since the failure."""

    step: int = STEP  # step of the failure: the requested one, or the next with that phase
    report: dict[str, Any] | None = None
    report_s: float | None = None
    end_s: float | None = None
    resumed_by: str = "-"  # torchrun, or a second launch
    lost: int | None = None  # repeated steps
    sha256: str | None = None
    leftovers: list[str] = field(default_factory=list)  # processes, shared memory, temporary files
    outputs: list[str] = field(default_factory=list)  # output of the first launch on each host

    def problems(self, case: Case, sha256: str, timeout_s: float) -> list[str]:
        """Return descriptions of what is wrong."""
        found = [] if self.sha256 == sha256 else ["different hash"]
        if self.leftovers:
            found.append(f"leftovers: {', '.join(self.leftovers)}")
        if case.failure == "slow":
            lines = "\n".join(self.outputs).splitlines()
            named = any(f"rank {case.rank} (" in line and "has been in" in line for line in lines)
            return found + ([] if named else ["not reported as slow"]) + (["failed"] if self.report else [])
        if self.report is None:
            return [*found, "no report"]
        if self.end_s is None or self.end_s > timeout_s + _SPARE_S:
            found.append(f"processes still alive after {timeout_s + _SPARE_S:.0f} s")
        expected: dict[str, Any] = {"status": 3 if case.failure == "nan" else 1, "rank": case.rank}
        if case.count > 1 and self.report.get("rank") in range(case.rank, case.rank + case.count):
            del expected["rank"]
        if case.failure == "cut":  # each host reports the other, and either may write last
            del expected["rank"]
            for host, said in enumerate(self.outputs):
                found += [] if f"host {1 - host} (" in said else [f"host {host} does not report the other"]
        elif case.failure not in ("nan", "diverge"):  # these are detected after the phase of the injection
            phase = "optimizer" if case.phase == "update" else case.phase
            expected |= {"step": self.step, "phase": phase}
        return found + [
            f"{key} is {self.report.get(key)}, expected {value}"
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


def on_hosts(members: Sequence[Host], per_host: int, *options: str, conf: str = "") -> Start:
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
    run_dir, scratch, failure_mark = folder / "run", folder / "tmp", folder / "failure_mark.json"
    scratch.mkdir(parents=True)
    mark = f"{os.getpid()}-{folder.name}"
    environment = {MARK: mark, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    overrides = [*settings(case, timeout_s), *case.command_line(failure_mark), f"run_dir={run_dir}"]
    outcome, pids = Outcome(), set[int]()
    with stopping(launchers := start(overrides, environment, folder)):
        _follow(outcome, launchers, run_dir, failure_mark, mark, pids, until_gone=case.failure == "cut")
    outcome.outputs = _outputs(folder)
    if resumed := re.search(r"resumed from .* at step (\d+)", outcome.outputs[0]):
        outcome.resumed_by = "torchrun"
        outcome.lost = max(0, outcome.step - 1 - int(resumed[1]))
    if case.failure != "none" and not (run_dir / "result.json").exists():
        outcome.resumed_by = "second launch"
        with stopping(launchers := start(overrides, environment, folder)):
            _follow(Outcome(), launchers, run_dir, failure_mark, mark, pids)
    with contextlib.suppress(OSError, ValueError):
        outcome.sha256 = json.loads((run_dir / "result.json").read_text())["param_sha256"]
    outcome.leftovers = [f"process {pid}" for pid in ranks_of(mark)]
    outcome.leftovers += [path.name for path in scratch.iterdir() if not path.name.startswith(_TORCH_FOLDERS)]
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    outcome.leftovers += [name for name in names if any(f"_{pid}_" in name for pid in pids)]
    return outcome


def _outputs(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(folder.glob("output*"))]


def _follow(
    outcome: Outcome,
    launchers: list[subprocess.Popen[bytes]],
    run_dir: Path,
    failure_mark: Path,
    mark: str,
    pids: set[int],
    until_gone: bool = False,
) -> None:
    """Watch a launch until its launchers have ended, and record the times of events.

    Args:
        failure_mark: the file that records the failure.
        pids: the pids of the first attempt's ranks are added to it.
        until_gone: return when the ranks have ended, although launchers still wait for a lost host.
    """
    deadline = time.monotonic() + _DEADLINE_S
    failed_at: float | None = None
    while time.monotonic() < deadline:
        has_ended = all(launcher.poll() is not None for launcher in launchers)
        if failed_at is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads(failure_mark.read_text())
                failed_at, outcome.step = float(record["time"]), int(record["step"])
            first = {pid for pid, restarts in ranks_of(mark).items() if restarts == 0}
            pids |= first
        else:
            if outcome.report is None:
                with contextlib.suppress(OSError, ValueError):
                    written = (run_dir / "failure.json").stat().st_mtime
                    outcome.report = json.loads((run_dir / "failure.json").read_text())
                    outcome.report_s = written - failed_at
            if outcome.end_s is None and not any(map(_is_alive, pids)):
                outcome.end_s = time.time() - failed_at
        if has_ended or (until_gone and outcome.end_s is not None):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on a signal, so that launchers are stopped and temporary folders removed."""
    received = list[int]()

    def end(number: int) -> None:
        received.append(number)
        if len(received) == 1:  # another signal must not interrupt the cleanup
            sys.exit(128 + number)

    with stop_signals_to(end):
        yield


@contextlib.contextmanager
def stopping(launchers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop the launchers and their ranks when the context ends, also after an error."""
    try:
        yield
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            try:
                launcher.wait(45)  # torchrun waits 30 s for its ranks
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def ranks_of(mark: str) -> dict[int, int]:
    """Return the live ranks of a drill and their data workers: the number of restarts by pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_alive(int(folder.name)):
            with contextlib.suppress(OSError):  # it may end at any moment
                entries = (folder / "environ").read_bytes().split(b"\0")
                variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
                if variables.get(MARK.encode()) == mark.encode() and b"RANK" in variables:
                    found[int(folder.name)] = int(variables.get(b"TORCHELASTIC_RESTART_COUNT", b"0"))
    return found


def _is_alive(pid: int) -> bool:
    return processes.state(pid) != "dead"
