"""Measure the CPU seconds of each process from its start to the first step, and the import time by package.

Each rank stops itself at the start of the second step, and its CPU time is read from the kernel: for the MLP
on the digits in one process, for two ranks under DDP, and for a trial of a sweep. Source trees are measured
in rotation, since other load on the machine makes all of them slower; compare the smallest values.

    python -m benchmarks.first_step [--rounds 5] [TREE ...]     default: this tree
    python -m benchmarks.first_step --packages                  seconds of imports in one process, by package
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
from tests.failure_parts import fault
from trainer.failures import processes

ROOT = Path(__file__).parents[1]
WAYS = {
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


def processor_s(tree: Path, way: str) -> float:
    """Return the CPU seconds of the slowest rank."""
    ranks = 2 if way == "ddp x2" else 1
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        place = f"hydra.sweep.dir={folder}/sweep" if way == "trial" else f"run_dir={folder}/run"
        stops = fault("stop", 0, 2, "data", count=ranks)
        mark = f"{os.getpid()}-{Path(folder).name}"
        launcher = subprocess.Popen(
            [sys.executable, "train.py", *WAYS[way], *stops, place],
            cwd=tree,
            env={**_environment(tree), MARK: mark},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while len(stopped := [pid for pid in _of(mark) if processes.state(pid) == "stopped"]) < ranks:
                if launcher.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{tree}, {way}: no first step")
                time.sleep(0.1)
            return max(map(_used_s, stopped))
        finally:
            launcher.kill()  # its ranks end too, even if they are stopped
            for pid in _of(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()


def _environment(tree: Path) -> dict[str, str]:
    """Return an environment in which Python caches compiled modules, as it does for users."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}


def _of(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end at any moment
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def packages(tree: Path) -> collections.Counter[str]:
    """Return the import time of each package's modules in a run of one step, in microseconds.

    Measured by the interpreter, which makes imports a third slower.
    """
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        command = [sys.executable, "-X", "importtime", "train.py", *WAYS["single"], f"run_dir={folder}/run"]
        told = subprocess.run(
            [*command, "train.max_steps=1", "train.eval_every_epochs=0", "checkpoint.every_epochs=null"],
            cwd=tree,
            env=_environment(tree),
            capture_output=True,
            text=True,
            check=True,
            timeout=_DEADLINE_S,
        ).stderr
    found = collections.Counter[str]()
    for microseconds, module in _IMPORTED.findall(told):
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
        taken = packages(tree)
        print(f"{tree}: {sum(taken.values()) / 1e6:.2f} s of imports")
        for name, microseconds in taken.most_common(14):
            print(f"  {name:24} {microseconds / 1e3:6.0f} ms")
    if arguments.packages:
        return
    measured = collections.defaultdict[tuple[str, Path], list[float]](list)
    for _ in range(arguments.rounds):
        for way in WAYS:
            for tree in arguments.trees:
                measured[way, tree].append(processor_s(tree.resolve(), way))
    print(f"CPU seconds to the end of the first step, {arguments.rounds} starts each")
    for (way, tree), seconds in measured.items():
        print(f"{way:8} median {statistics.median(seconds):.2f}, smallest {min(seconds):.2f}  {tree}")


if __name__ == "__main__":
    main()
