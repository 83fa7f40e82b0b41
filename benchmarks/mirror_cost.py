"""The cost of checkpoint.mirror_every=1: milliseconds per step with copies and without, alternating.

One run of the GPT of experiment=text_gpt under fsdp, in which copies are switched off and on every 12 steps,
on all ranks at once, so that other load on the machine affects both alike. With --hosts 2 the ranks are on
two hosts in name, and exchange their copies over this machine's loopback. Prints medians over the blocks, and
over the ratios of neighbours, as benchmarks/watch_cost.py does: of a block's mean step, of its median step,
and of the processor time of all threads of rank 0, which other load disturbs least.

    python -m benchmarks.mirror_cost [--processes 4] [--hosts 2] [--steps 600]
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.watch_cost import blocks, ratios
from tests.programs import finish_ranks

BLOCK = 12
SETTINGS = (
    *("experiment=text_gpt", "strategy=fsdp", "checkpoint.mirror_every=1", "checkpoint.every_epochs=null"),
    *("train.eval_every_epochs=0", "train.log_every_steps=1000", "train.global_batch_size=16"),
)


def train(out: Path, overrides: list[str]) -> None:
    """Run train.py, with the switch; rank 0 writes the steps of each block, as `blocks`, to `out`."""
    from ringmaster import main
    from trainer.checkpoint.mirror import Mirror
    from trainer.faults.heartbeat import Heartbeat

    keep, step = Mirror.keep, Heartbeat.step
    is_on, begins = threading.Event(), []

    def set_step(self: Heartbeat, value: int) -> None:
        begins.append((time.perf_counter(), time.process_time()))
        is_on.set() if len(begins) // BLOCK % 2 == 0 else is_on.clear()
        step.fset(self, value)  # type: ignore[attr-defined]

    def keep_if_on(self: Mirror, data_state: Mapping[str, Any]) -> None:
        if is_on.is_set():
            keep(self, data_state)

    Mirror.keep = keep_if_on  # type: ignore[method-assign]
    Heartbeat.step = property(step.fget, set_step)  # type: ignore[attr-defined, assignment]
    sys.argv = ["train.py", *overrides]
    main()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(blocks(begins, BLOCK)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--train", type=Path, metavar="OUT", help="be one rank, and write to OUT")
    arguments, overrides = parser.parse_known_args()
    if arguments.train:
        train(arguments.train, overrides)
        return
    where = [rank * arguments.hosts // arguments.processes for rank in range(arguments.processes)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        settings = (*SETTINGS, f"train.max_steps={arguments.steps}", f"run_dir={folder}/run", *overrides)
        module = ("-m", "benchmarks.mirror_cost")
        ranks = finish_ranks(where, *module, "--train", str(out), *settings, timeout_s=3600.0)
        if any(rank.code for rank in ranks):
            sys.exit("\n".join(rank.output for rank in ranks))
        found = json.loads(out.read_text())[2:]  # the first two are warm-up
    print("\n".join(ratios(f"{arguments.processes} processes on {arguments.hosts} host(s)", found)))


if __name__ == "__main__":
    main()
