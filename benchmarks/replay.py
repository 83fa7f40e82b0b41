"""Repeats an asynchronous run in its recorded order, and compares the models to the bit.

    python -m benchmarks.replay [--steps 200] [--times 5] [--workers 3] [--servers 1] [--max-staleness inf]

Prints the hash of the recorded run, of each replay, and of a second run with its own order.
"""

import argparse
import tempfile

from tests.ranks import run_ranks
from tests.runs import train


def run_all(root: str, times: int, *overrides: str) -> list[str]:
    ran = ("data=digits", "strategy=parameter_server", "optim=adamw", "optim.lr=0.003", *overrides)
    first = train(*ran, f"run_dir={root}/first")["param_sha256"]
    replay = f"strategy.replay={root}/first/arrivals"
    again = [train(*ran, replay, f"run_dir={root}/{i}")["param_sha256"] for i in range(times)]
    return [first, *again, train(*ran, f"run_dir={root}/other")["param_sha256"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", default="1")
    parser.add_argument("--max-staleness", default="inf")
    args = parser.parse_args()
    world_size = args.workers if args.servers == "all" else args.workers + int(args.servers)
    with tempfile.TemporaryDirectory() as root:
        first, *again, other = run_ranks(
            run_all, world_size, root, args.times, f"strategy.servers={args.servers}",
            f"strategy.max_staleness={args.max_staleness}", f"train.max_steps={args.steps}",
            "train.global_batch_size=48", "train.epochs=1000", "train.eval_every_epochs=0",
            "checkpoint.every_epochs=null", init=False, timeout_s=1200,
        )[0]  # fmt: skip
    print(f"recorded  {first}")
    for digest in again:
        print(f"replayed  {digest}  {'equal' if digest == first else 'DIFFERENT'}")
    print(f"unguided  {other}  {'equal' if other == first else 'different'}")
    print(f"equal: {again.count(first)} of {len(again)}")


if __name__ == "__main__":
    main()
