"""Flip bits on one rank, and check what train.verify_every finds.

    python -m benchmarks.verify_flips [--ranks 2 3 4] [--kinds activation ...] [--settings WORD ...]

In each case, an MLP trains on handwritten digits with one chunk per rank, and every chunk is verified. A bit
(sign, exponent or mantissa) of an activation, a gradient, a weight in memory, an integer sum, or a sent or
received message is flipped on one rank, always or one time in a hundred. Prints and writes for each case the
number of flipped bits, the step in which the error was raised, the ranks that it names, and whether they are
the right ones.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from tests.exact.flips import BITS, KINDS, Flip, found_each
from tests.ranks import run_ranks

_WORDS = (
    *("train.epochs=1000", "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "schedule=constant"),
    *("train.verify_every=1", "distributed.timeout_s=100", "train.global_batch_size=24"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--bits", nargs="*", default=list(BITS))
    parser.add_argument(
        "--every", type=int, nargs="*", default=[1, 100], help="flip a bit one time in EVERY (1 100)"
    )
    parser.add_argument("--steps", type=int, default=60, help="number of steps of a run with rare flips (60)")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of train.py to change")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for world in options.ranks:
        for strategy in ("ddp", "fsdp"):
            for kind in options.kinds:
                rows += _cases(world, strategy, kind, options)
                if options.out is not None:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for world in options.ranks:
        print(world, "ranks:", dict(Counter(row["outcome"] for row in rows if row["ranks"] == world)))


def _cases(world: int, strategy: str, kind: str, options: argparse.Namespace) -> list[dict[str, object]]:
    flips = [Flip(kind, bit, world - 1, every) for bit in options.bits for every in options.every]
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            (
                flip,
                (
                    *_WORDS,
                    f"train.exact={world}",
                    f"strategy={strategy}",
                    f"run_dir={folder}/{number}",
                    f"train.max_steps={4 if flip.every == 1 else options.steps}",
                    *options.settings,
                ),
            )
            for number, flip in enumerate(flips)
        ]
        hosts = [0, 0, 1, 1] if world == 4 else None
        results = run_ranks(found_each, world, *cases, init=False, timeout_s=900, hosts=hosts)[world - 1]
    rows = []
    for flip, result in zip(flips, results, strict=True):
        if not result.flips:
            outcome = "no flip"
        elif not result.message:
            outcome = "MISSED"
        elif not result.suspect:
            outcome = "other error"
        elif result.ranks == [flip.rank]:
            outcome = "found and named"
        elif not result.ranks or flip.rank in result.ranks:
            outcome = "found, undecided"
        else:
            outcome = "found, wrong rank named"
        rows.append(
            {
                "ranks": world,
                "strategy": strategy,
                "flipped": kind,
                "bit": flip.bit,
                "when": "always" if flip.every == 1 else f"1 in {flip.every}",
                "flips": result.flips,
                "step": result.steps,
                "named": result.ranks,
                "outcome": outcome,
                "message": result.message,
            }
        )
        print(*list(rows[-1].values())[:-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
