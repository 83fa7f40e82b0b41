"""Train with a failure every half minute, and compare the model with an uninterrupted run.

Uses DDP with comm=hierarchical, two hosts with two ranks each, asynchronous checkpoints, and data workers.
The first run is uninterrupted; memory, descriptors and threads of its ranks must not grow. The second run has
random failures, each in a separate launch that the next one resumes. Prints both hashes. The exit status is 1
if they differ, or if something grew.

    python -m benchmarks.soak --minutes 20

Hosts are network namespaces, which require root. Without root, all four ranks are on one host.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import drilled_run
from benchmarks.drilled_run import on_hosts
from tests.failure_parts import inject
from tests.hosts import Host, hosts

KINDS = ("kill", "stop", "raise", "hang", "exit", "slow", "nan", "diverge", "cut")
PHASES = ("data", "forward", "backward", "all_reduce", "optimizer", "checkpoint")
EVERY_S, TIMEOUT_S, RANKS = 30.0, 8.0, 4
WARMUP_S = 75.0  # time until the first plot, which imports matplotlib (about 33 MiB)
SHARE = 1 / 3  # fraction of the time with failures that is spent on new steps; the rest is stops and starts


@dataclass(frozen=True)
class Sample:
    """Resources of a rank: the maximum over ranks."""

    memory_mib: float
    descriptors: int
    threads: int


def settings(run_dir: Path, steps: int) -> list[str]:
    return [
        "strategy=ddp",
        "comm=hierarchical",
        f"run_dir={run_dir}",
        "resume=auto",
        "train.epochs=100000",
        f"train.max_steps={steps}",
        "train.eval_every_epochs=2",
        "train.check_replicas_every=50",
        "train.log_every_steps=20",
        "checkpoint.async=true",
        "checkpoint.every_steps=50",
        "checkpoint.every_epochs=null",
        "data.num_workers=1",
        f"distributed.timeout_s={TIMEOUT_S}",
    ]


class Soak:
    def __init__(self, members: list[Host], folder: Path) -> None:
        self.members, self.folder = members, folder
        self.start = on_hosts(members, 2) if members else drilled_run.torchrun(RANKS)

    @contextlib.contextmanager
    def launched(self, overrides: list[str], name: str) -> Iterator[list[subprocess.Popen[Any]]]:
        """Launch a run, with its output in the folder `name`, and stop it when the context ends."""
        scratch = self.folder / name
        (scratch / "tmp").mkdir(parents=True, exist_ok=True)
        environment = {
            drilled_run.MARK: mark_of(name),
            "TMPDIR": str(scratch / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        launchers = self.start(overrides, environment, scratch)
        with drilled_run.stopping(launchers):
            yield launchers

    def uninterrupted(self, name: str, steps: int) -> tuple[dict[str, Any], list[Sample]]:
        """Return the result of a run, and samples of its ranks every two seconds after a warm-up."""
        run_dir, samples, since = self.folder / name / "run", list[Sample](), float("inf")
        with self.launched(settings(run_dir, steps), name) as launchers:
            while any(launcher.poll() is None for launcher in launchers):
                time.sleep(2)
                if (run_dir / "train.log").exists() and "step 20/" in (run_dir / "train.log").read_text():
                    since = min(since, time.monotonic())
                if time.monotonic() - since > WARMUP_S:
                    with contextlib.suppress(OSError, ValueError):
                        samples.append(sample(drilled_run.ranks_of(mark_of(name))))
        return json.loads((run_dir / "result.json").read_text()), samples

    def with_failures(self, steps: int, ms_per_step: float, seed: int) -> tuple[dict[str, Any], list[str]]:
        """Return the result of a run with a failure every half minute, and descriptions of the failures."""
        draw, run_dir, done = random.Random(seed), self.folder / "with_failures" / "run", []
        gap = max(60, int(SHARE * EVERY_S * 1e3 / ms_per_step))
        while not (run_dir / "result.json").exists():
            begin = time.monotonic()
            at = saved_step(run_dir) + draw.randint(gap // 2, gap * 3 // 2)
            name = f"launch{len(done)}"
            mark = self.folder / f"{name}.json"
            words, options = self.random_failure(draw, at, mark) if at < steps - 60 else ("no failure", ())
            with self.launched([*settings(run_dir, steps), *options], name) as launchers:
                while all(launcher.poll() is None for launcher in launchers) and not has_continued(mark):
                    time.sleep(0.5)
                if all(launcher.poll() is None for launcher in launchers):
                    words += ", then SIGTERM"
                    for launcher in launchers:
                        launcher.terminate()  # the ranks save and stop
                deadline = time.monotonic() + 2 * TIMEOUT_S
                while drilled_run.ranks_of(mark_of(name)) and time.monotonic() < deadline:
                    time.sleep(0.2)
                left = len(drilled_run.ranks_of(mark_of(name)))
            done.append(words)
            print(
                f"  {words:<62} {time.monotonic() - begin:5.1f} s  saved to step {saved_step(run_dir)}"
                + (f"  {left} processes left over" if left else ""),
                flush=True,
            )
            if len(done) > 500:
                raise RuntimeError("the run makes no progress")
        return json.loads((run_dir / "result.json").read_text()), done

    def random_failure(self, draw: random.Random, step: int, mark: Path) -> tuple[str, tuple[str, ...]]:
        """Return a description of a random failure, and its overrides."""
        kind, phase, command = draw.choice(KINDS if self.members else KINDS[:-1]), draw.choice(PHASES), ""
        # Not rank 0, which saves: a bit that flips between check and copy would be saved too.
        rank = draw.randrange(1 if kind == "diverge" else 0, RANKS)
        if kind == "cut":
            host = self.members[rank // 2]
            command = f"ip -n {host.switch} link set {host.port} down"
        options = inject(kind, rank, step, phase, mark=mark, command=command)
        return f"{kind} rank {rank} step {step} {phase}", options


def has_continued(mark: Path) -> bool:
    """Return whether the run has continued for three timeouts after the failure."""
    with contextlib.suppress(OSError, ValueError):
        return time.time() - json.loads(mark.read_text())["time"] > 3 * TIMEOUT_S
    return False


def mark_of(name: str) -> str:
    """Return a mark for the processes of a launch, different from those of other soaks."""
    return f"{os.getpid()}-{name}"


def saved_step(run_dir: Path) -> int:
    found = [int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*")]
    return max(found, default=0)


def sample(pids: Iterator[int] | dict[int, int]) -> Sample:
    """Sample processes. Raises OSError if one of them ends meanwhile, and ValueError if there are none."""
    folders = [Path(f"/proc/{pid}") for pid in pids]
    pages = max(int((folder / "statm").read_text().split()[1]) for folder in folders)
    return Sample(
        memory_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        descriptors=max(len(list((folder / "fd").iterdir())) for folder in folders),
        threads=max(len(list((folder / "task").iterdir())) for folder in folders),
    )


def growth(samples: list[Sample]) -> list[str]:
    """Print each fifth of the samples, and return what grew from the first fifth to the last."""
    size = len(samples) // 5
    if not size:
        return ["too few samples"]
    fifths = [samples[index * size : (index + 1) * size] for index in range(5)]
    names = ("memory_mib", "descriptors", "threads")
    rows = [[statistics.median(getattr(one, name) for one in fifth) for name in names] for fifth in fifths]
    for memory, descriptors, threads in rows:
        print(f"  {memory:8.1f} MiB  {descriptors:4.0f} descriptors  {threads:4.0f} threads", flush=True)
    (memory, descriptors, threads), last = rows[0], rows[-1]
    found = [f"memory by {last[0] - memory:.1f} MiB"] if last[0] > memory * 1.03 + 5 else []
    found += ["descriptors"] if last[1] > descriptors + 2 else []
    return found + (["threads"] if last[2] > threads else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="approximate duration of the run with failures"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the failures")
    arguments = parser.parse_args()
    with drilled_run.exit_on_signals(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        members = stack.enter_context(hosts(2)) if os.geteuid() == 0 else []
        soak = Soak(members, folder)
        short, _ = soak.uninterrupted("short", 200)
        steps = max(400, int(SHARE * arguments.minutes * 60e3 / short["ms_per_step"]))
        print(f"{steps} steps of {short['ms_per_step']:.1f} ms, uninterrupted:", flush=True)
        expected, samples = soak.uninterrupted("uninterrupted", steps)
        grown = growth(samples)
        print("with failures:", flush=True)
        begin = time.monotonic()
        result, done = soak.with_failures(steps, expected["ms_per_step"], arguments.seed)
        minutes = (time.monotonic() - begin) / 60
    equal = result["param_sha256"] == expected["param_sha256"]
    print(f"{len(done) - 1} failures in {minutes:.1f} minutes; {result['steps']} steps")
    print(f"uninterrupted {expected['param_sha256']}\nwith failures {result['param_sha256']}")
    print("growth: " + (", ".join(grown) or "nothing"))
    sys.exit(0 if equal and not grown else 1)


if __name__ == "__main__":
    main()
