"""Measure the cost of a change: CPU time per step of two checkouts that train at the same time on one core.

    python -m benchmarks.two_checkouts BEFORE AFTER [--processes 2] [--rounds 3] [--steps 8800] [SETTING ...]
    python -m benchmarks.two_checkouts . . --after comm.timeline=false      the cost of a setting

BEFORE and AFTER are directories with two commits (`git worktree add`); SETTINGs are overrides for train.py.
The kernel switches between both processes every few milliseconds, so that other load affects both equally:
comparing a checkout with itself gives 1.00 to 1.01, while consecutive runs differ by up to a third. The CPU
time of a run of 22 steps is subtracted, as the cost of start and end. Waiting times are not measured.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_START = 22
_QUIET = ("train.eval_every_epochs=0", "checkpoint.every_epochs=null", "schedule=constant")


def cpu_seconds(
    checkouts: Sequence[Path], core: int, processes: int, words: Sequence[Sequence[str]]
) -> list[float]:
    """Return the CPU time of a run of each checkout, including children; the runs start at the same time."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for number, checkout in enumerate(checkouts):
            command = [
                "taskset",
                "-c",
                str(core),
                *launcher,
                "train.py",
                *words[number],
                f"run_dir={scratch}/{number}",
            ]
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
            with Path(scratch, f"{number}.log").open("w") as log:
                runs.append(
                    subprocess.Popen(
                        command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        seconds = []
        for number, run in enumerate(runs):
            _, status, used = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            if run.returncode:
                for other in runs[number + 1 :]:
                    other.kill()
                sys.exit(Path(scratch, f"{number}.log").read_text())
            seconds.append(used.ru_utime + used.ru_stime)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path, nargs=2, metavar="CHECKOUT")
    parser.add_argument("words", nargs="*", metavar="SETTING", help="settings of both runs")
    parser.add_argument(
        "--after", nargs="+", default=[], metavar="SETTING", help="settings of the second run only"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8800)
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_intermixed_args()
    words = [*_QUIET, f"strategy={'ddp' if arguments.processes > 1 else 'single'}", *arguments.words]
    words += ["train.epochs=100000"]
    ratios = []
    for _ in range(arguments.rounds):
        used = [
            cpu_seconds(
                arguments.checkouts,
                arguments.core,
                arguments.processes,
                [[*words, *more, f"train.max_steps={n}"] for more in ([], arguments.after)],
            )
            for n in (_START, arguments.steps)
        ]
        before, after = (long - start for start, long in zip(*used, strict=True))
        ratios.append(after / before)
        scale = 1e3 / (arguments.steps - _START)
        print(
            f"before {before * scale:.3f}  after {after * scale:.3f} ms per step  ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"after / before: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
