"""The cost of train.exact: processor time of a step, beside the same micro-batches without it.

Takes turns, in ranks forked from one process that has all loaded, and prints the median ratio of the pairs
and its bar. Processor time is that of all ranks, with their threads; the median step counts.

    python -m benchmarks.exact [--turns 5] [CASE ...]
    python -m benchmarks.exact --matrix     no cost: three models, two optimizers, 13 runs each; one hash each
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests import runs
from tests.exact.matrix import OPTIMIZERS, matrix
from tests.ranks import run_ranks

LEAVES = 8
MATRIX = ("mlp", "resnet", "gpt")
COMMS = ("native", "ring", "tree", "halving_doubling", "hierarchical", "master_worker")
COMMON = ("train.eval_every_epochs=0", "checkpoint.every_epochs=null", "train.log_every_steps=1000000")
MODELS = {
    "mlp": ("model.hidden=[256,256]", "train.global_batch_size=64", "train.epochs=1000"),
    "gpt": (
        *("data=text", "model=gpt", "model.width=128", "model.depth=4", "model.num_heads=4", "optim=adamw"),
        *("optim.lr=0.001", "data.dataset.block_size=128", "train.global_batch_size=32"),
    ),
}
# model, ranks, strategy, steps, bar
CASES: dict[str, tuple[str, int, str, int, float]] = {
    "mlp": ("mlp", 1, "single", 400, 1.4),
    "gpt": ("gpt", 1, "single", 15, 1.15),
    "ddp-gpt": ("gpt", 2, "ddp", 15, 1.25),
}


def step_ms(steps: int, overrides: Sequence[str]) -> float:
    """The processor time of this rank's median step, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*COMMON, *overrides, f"run_dir={folder}", f"train.max_steps={steps}")
        with runs.context_of(*words) as context:
            times = [time.process_time()]
            times += [time.process_time() for _ in runs.steps_of(context)]
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(times[5:]))


def measure(case: str, turns: int) -> bool:
    """Print the case's row; return whether it is under its bar."""
    model, ranks, strategy, steps, bar = CASES[case]
    words = (*MODELS[model], f"strategy={strategy}")
    batch = next(int(word.partition("=")[2]) for word in words if word.startswith("train.global_batch_size"))
    ways = {
        "without": (*words, f"train.micro_batch_size={batch // LEAVES}"),
        "exact": (*words, f"train.exact={LEAVES}"),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, overrides in ways.items():
            found[way].append(sum(run_ranks(step_ms, ranks, steps, overrides, init=False)))
    pairs = list(zip(found["without"], found["exact"], strict=True))
    ratio = statistics.median(exact / without for without, exact in pairs)
    without, exact = (statistics.median(found[way]) for way in ways)
    print(f"{case:8} {ranks:5} {without:12.3f} {exact:12.3f} {ratio:6.2f} {bar:6.2f}", flush=True)
    return ratio <= bar


def one_hash(model: str, optimizer: str) -> bool:
    """Print how many results the runs of a model have; return whether it is one."""
    with tempfile.TemporaryDirectory() as folder:
        comms = {2: ("native",), 3: ("native",), 4: COMMS, 8: ("native",)}
        found = matrix(Path(folder), model, optimizer, comms)
    print(f"{model:8} {optimizer:8} {len(found)} runs, {len(set(found.values()))} result(s)", flush=True)
    return len(set(found.values())) == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--matrix", action="store_true", help="compare runs in place of measuring")
    options = parser.parse_args()
    if options.matrix:
        equal = [one_hash(model, optimizer) for model in MATRIX for optimizer in OPTIMIZERS]
        sys.exit(not all(equal))

    print(f"{'case':8} {'ranks':>5} {'without ms':>12} {'exact ms':>12} {'ratio':>6} {'bar':>6}")
    under = [measure(case, options.turns) for case in options.cases or CASES]
    sys.exit(0 if all(under) else 1)


if __name__ == "__main__":
    main()
