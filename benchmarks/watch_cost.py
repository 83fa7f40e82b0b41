"""The cost of the watch: milliseconds per step with heartbeats and watch, and without, alternating.

One run of the MLP on the digits, the setting of harness_cost.py, in which both are switched off and on every
60 steps, on all ranks at once, so that other load on the machine affects both alike. Prints medians over
the blocks, and over the ratios of neighbours: of a block's mean step; of its median step, which a busy
machine disturbs less, but which does not show the watch's own checks, five a second; and of the processor
time of all threads of rank 0, which others disturb least.

    python -m benchmarks.watch_cost [--processes 2] [--epochs 60]
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness_cost import BATCH, ROOT, launch

BLOCK = 60


def train(out: Path, overrides: list[str]) -> None:
    """Run train.py, with the switch; rank 0 writes the median step of each block, in ms, to `out`."""
    from ringmaster import main
    from trainer.faults.heartbeat import Heartbeat
    from trainer.faults.watch import Watch

    enter, step, look, stop = Heartbeat.enter, Heartbeat.step, Watch._look, Watch._stop_looking
    is_on, begins = threading.Event(), []
    is_on.set()

    def set_step(self: Heartbeat, value: int) -> None:
        begins.append((time.perf_counter(), time.process_time()))
        is_on.set() if len(begins) // BLOCK % 2 == 0 else is_on.clear()
        step.fset(self, value)  # type: ignore[attr-defined]

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
    Heartbeat.step = property(step.fget, set_step)  # type: ignore[attr-defined, assignment]
    if os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: out.write_text(json.dumps(blocks(begins))))
    sys.argv = ["train.py", *overrides]
    main()


def blocks(begins: list[tuple[float, float]]) -> list[tuple[float, ...]]:
    """Mean and median step of each block, without those around the switch, and its processor time; in ms."""
    ms = [[1e3 * (b - a) for a, b in zip(*step, strict=True)] for step in pairwise(begins)]
    whole = [ms[at + 1 : at + BLOCK - 1] for at in range(0, len(ms) - BLOCK, BLOCK)]
    columns = [list(zip(*block, strict=True)) for block in whole]
    return [(statistics.fmean(wall), statistics.median(wall), statistics.fmean(cpu)) for wall, cpu in columns]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--train", type=Path, metavar="OUT", help="be one rank, and write to OUT")
    arguments, overrides = parser.parse_known_args()
    if arguments.train:
        train(arguments.train, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        settings = [f"strategy={'ddp' if arguments.processes > 1 else 'single'}", "schedule=constant"]
        settings += [f"train.global_batch_size={BATCH * arguments.processes}", "checkpoint.every_epochs=null"]
        settings += ["train.eval_every_epochs=0", f"train.epochs={arguments.epochs}", f"run_dir={folder}/run"]
        os.environ["PYTHONPATH"] = str(ROOT)
        launch(arguments.processes, str(Path(__file__)), "--train", str(out), *settings)
        found = json.loads(out.read_text())[2:]  # the first two are warm-up
    for name, values in zip(("mean", "median", "processor's"), zip(*found, strict=True), strict=True):
        on, off = values[0::2], values[1::2]
        pairs = [*zip(on, off, strict=False), *zip(on[1:], off, strict=False)]
        print(
            f"{arguments.processes} process(es), {name} step of {len(values)} blocks: "
            f"on {statistics.median(on):.3f} ms, off {statistics.median(off):.3f} ms, "
            f"ratio {statistics.median(a / b for a, b in pairs):.3f}"
        )


if __name__ == "__main__":
    main()
