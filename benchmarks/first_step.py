"""Measure the CPU time of a process from its start to the first step, and the import time per package.

Trains the MLP on the digits in one process, on two ranks with DDP, and as a trial of a sweep. Each rank stops
itself at the start of the second step, and its CPU time is read from /proc. Source trees are measured in
rotation, because other load on the machine only makes them slower: compare the minima.

    python -m benchmarks.first_step [--rounds 5] [TREE ...]     the default is this tree
    python -m benchmarks.first_step --packages                  import time per package, in one process
"""

import argparse
import collections
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.drilled_run import MARK
from tests.failure_parts import inject
from trainer.failures import processes

ROOT = Path(__file__).parents[1]
RUNS = {
    "single": ("strategy=single",),
    "ddp x2": ("strategy=ddp", "launch=local", "launch.processes=2"),
    "trial": ("-m", "strategy=single", "optim.lr=0.1,0.05", "hydra.sweeper.concurrent=1"),
}
_DEADLINE_S = 240.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_WITHIN_TORCH = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed",
    "torch.fx",
    "torch.utils.tensorboard",
)


def cpu_seconds(tree: Path, run: str) -> float:
    """Return the CPU seconds of the slowest rank."""
    ranks = 2 if run == "ddp x2" else 1
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        directory = f"hydra.sweep.dir={folder}/sweep" if run == "trial" else f"run_dir={folder}/run"
        stops = inject("stop", 0, 2, "data", count=ranks)
        mark = f"{os.getpid()}-{Path(folder).name}"
        launcher = subprocess.Popen(
            [sys.executable, "train.py", *RUNS[run], *stops, directory],
            cwd=tree,
            env={**_environment(tree), MARK: mark},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while len(stopped := [pid for pid in _pids(mark) if processes.state(pid) == "stopped"]) < ranks:
                if launcher.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{tree}, {run}: no first step")
                time.sleep(0.1)
            return max(map(_cpu_s, stopped))
        finally:
            launcher.kill()  # ends its ranks too, even if they are stopped
            for pid in _pids(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()


def _environment(tree: Path) -> dict[str, str]:
    """Return an environment in which Python caches compiled modules, as it does for users."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}


def _pids(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end at any moment
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def import_times(tree: Path) -> collections.Counter[str]:
    """Return the import time of each package's modules in a run of one step, in microseconds.

    Measured by Python's -X importtime, which makes imports a third slower.
    """
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        command = [sys.executable, "-X", "importtime", "train.py", *RUNS["single"], f"run_dir={folder}/run"]
        timings = subprocess.run(
            [*command, "train.max_steps=1", "train.eval_every_epochs=0", "checkpoint.every_epochs=null"],
            cwd=tree,
            env=_environment(tree),
            capture_output=True,
            text=True,
            check=True,
            timeout=_DEADLINE_S,
        ).stderr
    found = collections.Counter[str]()
    for microseconds, module in _IMPORTED.findall(timings):
        within = next((name for name in _WITHIN_TORCH if f"{module}.".startswith(f"{name}.")), None)
        found[within or module.partition(".")[0]] += int(microseconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", action="store_true")
    arguments = parser.parse_args()
    for tree in arguments.trees if arguments.packages else ():
        times = import_times(tree)
        print(f"{tree}: {sum(times.values()) / 1e6:.2f} s of imports")
        for name, microseconds in times.most_common(14):
            print(f"  {name:24} {microseconds / 1e3:6.0f} ms")
    if arguments.packages:
        return
    measured = collections.defaultdict[tuple[str, Path], list[float]](list)
    for _ in range(arguments.rounds):
        for run in RUNS:
            for tree in arguments.trees:
                measured[run, tree].append(cpu_seconds(tree.resolve(), run))
    print(f"CPU time to the end of the first step, {arguments.rounds} starts each")
    for (run, tree), seconds in measured.items():
        print(f"{run:8} median {statistics.median(seconds):.2f} s, minimum {min(seconds):.2f} s  {tree}")


if __name__ == "__main__":
    main()
