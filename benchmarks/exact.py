"""Measure the cost of train.exact: the CPU time of a step with and without it, for the same micro-batches.

Alternates both in the same ranks, and prints the median ratio and its limit. `x single` is the ratio to a
single micro-batch per rank, whose kernels are larger. CPU time is the sum over all ranks and their threads,
in the median step.

    python -m benchmarks.exact [--turns 5] [CASE ...]
    python -m benchmarks.exact --matrix     compare only hashes: 13 runs for each of 3 models and 2 optimizers
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import runs
from tests.exact.matrix import OPTIMIZERS, matrix
from tests.ranks import run_ranks

NUM_CHUNKS = 8
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
# Model, ranks, strategy, steps, limit of the ratio (which allows for other load on the machine).
CASES: dict[str, tuple[str, int, str, int, float]] = {
    "mlp": ("mlp", 1, "single", 100, 1.8),
    "mlp-2": ("mlp", 2, "ddp", 60, 1.8),
    "mlp-4": ("mlp", 4, "ddp", 40, 1.8),
    "gpt": ("gpt", 1, "single", 9, 1.4),
    "gpt-2": ("gpt", 2, "ddp", 9, 1.4),
    "gpt-4": ("gpt", 4, "ddp", 9, 1.5),
}


def step_ms(steps: int, turns: int, variants: Mapping[str, Sequence[str]]) -> list[dict[str, float]]:
    """Return the CPU time of this rank's median step in ms, by variant, for each turn."""
    found: list[dict[str, float]] = []
    for _ in range(turns):
        found.append({})
        for variant, overrides in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                words = (*COMMON, *overrides, f"run_dir={folder}", f"train.max_steps={steps}")
                with runs.context_of(*words) as context:
                    times = [time.process_time()]
                    times += [time.process_time() for _ in runs.steps_of(context)]
            each = [after - before for before, after in itertools.pairwise(times[5:])]
            found[-1][variant] = 1e3 * statistics.median(each)
    return found


def measure(case: str, turns: int) -> bool:
    """Print the row of a case, and return whether the ratio is below its limit."""
    model, ranks, strategy, steps, limit = CASES[case]
    words = (*MODELS[model], f"strategy={strategy}")
    batch = next(int(word.partition("=")[2]) for word in words if word.startswith("train.global_batch_size"))
    variants = {
        "single": words,
        "without": (*words, f"train.micro_batch_size={batch // NUM_CHUNKS}"),
        "exact": (*words, f"train.exact={NUM_CHUNKS}"),
    }
    by_rank = run_ranks(step_ms, ranks, steps, turns, variants, init=False)
    found = {name: [sum(rank[turn][name] for rank in by_rank) for turn in range(turns)] for name in variants}
    of_single, ratio = (
        statistics.median(exact / other for other, exact in zip(found[name], found["exact"], strict=True))
        for name in ("single", "without")
    )
    times = " ".join(f"{statistics.median(each):10.3f}" for each in found.values())
    print(f"{case:8} {ranks:5} {times} {of_single:8.2f} {ratio:6.2f} {limit:6.2f}", flush=True)
    return ratio <= limit


def one_hash(model: str, optimizer: str) -> bool:
    """Print the number of different hashes of a model's runs, and return whether there is only one."""
    with tempfile.TemporaryDirectory() as folder:
        comms = {2: ("native",), 3: ("native",), 4: COMMS, 8: ("native",)}
        found = matrix(Path(folder), model, optimizer, comms)
    print(
        f"{model:8} {optimizer:8} {len(found)} runs, {len(set(found.values()))} different hash(es)",
        flush=True,
    )
    return len(set(found.values())) == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"from {', '.join(CASES)} (all)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--matrix", action="store_true", help="compare hashes of runs instead of measuring")
    options = parser.parse_args()
    if options.matrix:
        equal = [one_hash(model, optimizer) for model in MATRIX for optimizer in OPTIMIZERS]
        sys.exit(not all(equal))

    columns = " ".join(f"{name:>10}" for name in ("single ms", "without ms", "exact ms"))
    print(f"{'case':8} {'ranks':>5} {columns} {'x single':>8} {'ratio':>6} {'limit':>6}")
    within = [measure(case, options.turns) for case in options.cases or CASES]
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
