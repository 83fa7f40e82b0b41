"""Compare the same training with plain PyTorch, Lightning Fabric, Lightning, Accelerate and Ringmaster.

Two jobs: the MLP on the digits, batch size 64 per process, SGD with momentum; and a GPT of 842,496 parameters
on bytes, batch size 16 per process, AdamW, clipping. Each trainer gets the same initial weights, batches and
steps, in one process or with DDP in two; the norm of the final weights shows that the work is the same.
`plain` is a plain PyTorch loop. All trainers except Ringmaster and `plain_batches` read single samples;
`plain_batches` reads a batch with one index operation.

Each round runs the trainers in a new random order. Prints medians, and the ratio to `plain_batches` within a
round:

    ms      wall time per step, without the first quarter of the steps
    cpu ms  CPU time of rank 0 per step, for the same steps
    start   seconds from the launch to the end of the first step
    save    seconds for the trainer's own checkpoint (Ringmaster's is hashed and synced to disk)
    resume  seconds from the launch to the end of the first step after that checkpoint
    MiB     peak memory of rank 0
    norm    norm of the final weights

With --together, all trainers of a round train at the same time on one core, and ratios are between `cpu ms`:
other load on the machine slows all of them equally. The wall times are then meaningless.

    pip install 'ringmaster-trainer[peers]'
    python -m benchmarks.peers [--jobs mlp gpt] [--processes 1 2] [--rounds 5] [--together]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.peer_loops import TRAINERS

BASELINE = "plain_batches"  # the denominator of all ratios


def measure(trainer: str, job: str, processes: int, core: int | None = None) -> dict[str, float]:
    """Train and save, then resume from the checkpoint in new processes, on `core` if it is given."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = _launch(trainer, job, processes, core, folder / "first")
        resumed = _launch(trainer, job, processes, core, folder / "resumed", folder / "first" / "saved")
    return first | {"resume": resumed["start"]}


def _launch(
    trainer: str, job: str, processes: int, core: int | None, folder: Path, start: Path | None = None
) -> dict[str, float]:
    folder.mkdir()
    command = [sys.executable] if core is None else ["taskset", "-c", str(core), sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["-m", "benchmarks.peer_loops", trainer, job, str(folder)]
    command += [str(start)] if start is not None else []
    begin = time.time()
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-4000:]}status {done.returncode} of {' '.join(command)}")
    facts: dict[str, float] = json.loads((folder / "measurements.json").read_text())
    return facts | {"start": facts.pop("first_at") - begin}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="+", default=["mlp", "gpt"], choices=["mlp", "gpt"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument(
        "--together", action="store_true", help="run all trainers at the same time on one core"
    )
    arguments = parser.parse_args()
    for job_name in arguments.jobs:
        for processes in arguments.processes:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.trainers}
            for _ in range(arguments.rounds):
                names = random.sample(arguments.trainers, len(arguments.trainers))
                core = 0 if arguments.together else None
                with ThreadPoolExecutor(len(names) if arguments.together else 1) as executor:
                    results = executor.map(
                        partial(measure, job=job_name, processes=processes, core=core), names
                    )
                    for name, one in zip(names, results, strict=True):
                        found[name].append(one)
            _print(job_name, processes, found, "cpu ms" if arguments.together else "ms")


def _print(job: str, processes: int, found: dict[str, list[dict[str, float]]], of: str) -> None:
    columns = ("ms", "cpu ms", "start", "save", "resume", "MiB", "norm")
    print(f"\n{job}, {processes} process(es)   ratio of {of}: median, minimum and maximum")
    print(f"{'':14s}{'ratio':>20s}" + "".join(f"{column:>10s}" for column in columns))
    for name, rounds in found.items():
        line = ""
        if BASELINE in found:
            ratios = sorted(one[of] / first[of] for one, first in zip(rounds, found[BASELINE], strict=True))
            line = f"{statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        values = [statistics.median(one.get(column, float("nan")) for one in rounds) for column in columns]
        print(f"{name:14s}{line:>20s}" + "".join(f"{value:10.5g}" for value in values), flush=True)


if __name__ == "__main__":
    main()
