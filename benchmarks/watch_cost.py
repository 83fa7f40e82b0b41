"""Measure the cost of heartbeats and monitoring, or of the failure snapshot, in milliseconds per step.

With --of snapshot, measures `checkpoint.on_failure`: the copies for the failure snapshot after each update.

In a run of the MLP on the digits, with the settings of harness_cost.py, all ranks switch the feature off and
on every 60 steps, so that other load on the machine affects both equally. Prints medians over blocks of 60
steps, and over the ratios of consecutive blocks, of three quantities: the mean step; the median step, which
depends less on other load but misses the checks of the watch thread, five per second; and the CPU time of all
threads of rank 0, which depends least on other load.

    python -m benchmarks.watch_cost [--processes 2] [--epochs 60] [--of snapshot]
"""

import argparse
import atexit
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness_cost import BATCH, ROOT, launch

BLOCK = 60


def train(out: Path, of: str, overrides: list[str]) -> None:
    """Run train.py and switch the feature `of`; rank 0 writes the times of each block to `out`, in ms."""
    from ringmaster import main
    from trainer.failures.heartbeat import Heartbeat

    step, is_on, begins = Heartbeat.step, threading.Event(), []
    is_on.set()

    def set_step(self: Heartbeat, value: int) -> None:
        begins.append((time.perf_counter(), time.process_time()))
        is_on.set() if len(begins) // BLOCK % 2 == 0 else is_on.clear()
        step.fset(self, value)  # type: ignore[attr-defined]

    Heartbeat.step = property(step.fget, set_step)  # type: ignore[attr-defined, assignment]
    (switch_watch if of == "watch" else switch_snapshot)(is_on)
    if os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: out.write_text(json.dumps(blocks(begins))))
    sys.argv = ["train.py", *overrides]
    main()


def switch_watch(is_on: threading.Event) -> None:
    from trainer.failures.heartbeat import Heartbeat
    from trainer.failures.watch import Watch

    enter, look, stop = Heartbeat.enter, Watch._look, Watch._stop_looking

    def enter_if_on(self: Heartbeat, *phase: Any) -> None:
        if is_on.is_set():
            enter(self, *phase)

    def look_if_on(self: Watch) -> None:
        is_on.wait()
        look(self)

    def stop_awake(self: Watch) -> None:
        is_on.set()
        stop(self)

    Heartbeat.enter, Watch._look, Watch._stop_looking = enter_if_on, look_if_on, stop_awake  # type: ignore[method-assign]


def switch_snapshot(is_on: threading.Event) -> None:
    from trainer.guards.failure_snapshot import FailureSnapshot, Snapshot

    for name in ("update", "waiting"):
        on, off = getattr(FailureSnapshot, name), getattr(Snapshot, name)
        setattr(FailureSnapshot, name, _switched(is_on, on, off))


def _switched(is_on: threading.Event, on: Callable[..., Any], off: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments: (on if is_on.is_set() else off)(self, *arguments)


def blocks(begins: list[tuple[float, float]], size: int = BLOCK) -> list[tuple[float, ...]]:
    """Return mean, median and CPU time per step of each block in ms, without steps next to a switch."""
    ms = [[1e3 * (b - a) for a, b in zip(*step, strict=True)] for step in pairwise(begins)]
    inner = [ms[at + 1 : at + size - 1] for at in range(0, len(ms) - size, size)]
    columns = [list(zip(*block, strict=True)) for block in inner]
    return [(statistics.fmean(wall), statistics.median(wall), statistics.fmean(cpu)) for wall, cpu in columns]


def ratios(processes: str, found: list[tuple[float, ...]]) -> list[str]:
    """Return lines with medians over blocks in which the feature is alternately on and off."""
    lines = []
    for name, values in zip(("mean", "median", "CPU time of a"), zip(*found, strict=True), strict=True):
        on, off = values[0::2], values[1::2]
        pairs = [*zip(on, off, strict=False), *zip(on[1:], off, strict=False)]
        lines.append(
            f"{processes}, {name} step in {len(values)} blocks: "
            f"on {statistics.median(on):.3f} ms, off {statistics.median(off):.3f} ms, "
            f"ratio {statistics.median(a / b for a, b in pairs):.3f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--train", type=Path, metavar="OUT", help="run as one rank, and write times to OUT")
    parser.add_argument("--of", choices=("watch", "snapshot"), default="watch")
    arguments, overrides = parser.parse_known_args()
    if arguments.train:
        train(arguments.train, arguments.of, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        settings = [f"strategy={'ddp' if arguments.processes > 1 else 'single'}", "schedule=constant"]
        settings += [f"train.global_batch_size={BATCH * arguments.processes}", "checkpoint.every_epochs=null"]
        settings += ["train.eval_every_epochs=0", f"train.epochs={arguments.epochs}", f"run_dir={folder}/run"]
        os.environ["PYTHONPATH"] = str(ROOT)
        options = ["--train", str(out), "--of", arguments.of]
        launch(arguments.processes, str(Path(__file__)), *options, *settings, *overrides)
        found = json.loads(out.read_text())[2:]  # the first two are warm-up
    print("\n".join(ratios(f"{arguments.processes} process(es)", found)))


if __name__ == "__main__":
    main()
