"""Compare predicted with measured times of training steps on two hosts, which must agree within 15 %.

    python -m benchmarks.predicted_steps [--per-host 2,4] [--rate 1gbit] [--models waiting,gpt] [--steps 40]

For each number of processes, a run on one host measures the step time and the buckets, and a preflight
measures the capacities of the two hosts and their link. From these, `planner.comm --train` predicts the step
on two hosts, which is measured twice, before and after the preflight. Hosts are network namespaces on one
machine, so this requires root. The run on one host has the same number of processes, so that each gets the
same fraction of the CPU. The model `waiting` computes nothing and only waits, as a CPU waits for an
accelerator; `gpt` computes on the CPU.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from planner import entries, step
from planner.cost_model import Machine, measured
from planner.world import PlannedWorld
from tests.hosts import Host
from tests.hosts import hosts as network
from tests.programs import finish_ranks
from tests.ranks import run_ranks
from trainer.comm import preflight

COMMON = (
    "train.log_every_steps=1000", "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "optim=sgd",
    "train.check_replicas_every=null",
)  # fmt: skip
MODELS = {
    "waiting": (
        "data=fake", "model=mlp", "model._target_=benchmarks.waiting_model.Waiting", "~model.hidden",
        "~model.input_shape", "+model.layers=8", "+model.megabytes=26", "+model.forward_ms=12",
        "train.global_batch_size=8",
    ),
    "gpt": (
        "experiment=text_gpt", "model.width=256", "model.depth=6", "model.num_heads=4",
        "train.global_batch_size=8",
    ),
}  # fmt: skip
BUCKET_MB = {"waiting": 6, "gpt": 4}
ALGORITHMS = ("ring", "hierarchical")
LIMIT = 1.15


def run(
    places: Sequence[int | Host], settings: Sequence[str], algorithm: str, steps: int, run_dir: Path
) -> step.MeasuredRun:
    options = (*COMMON, *settings, f"comm={algorithm}", f"train.max_steps={steps}", f"run_dir={run_dir}")
    ended = finish_ranks(places, "train.py", *options, env={"OMP_NUM_THREADS": "1"}, timeout_s=400)
    if any(rank.code for rank in ended):
        raise SystemExit("\n".join(rank.output for rank in ended))
    return step.read(run_dir)


def quiet_preflight(*argv: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return preflight.main(list(argv))


def machine_of(places: Sequence[int | Host], file: Path) -> Machine:
    run_ranks(quiet_preflight, len(places), "--json", str(file), init=False, hosts=places, timeout_s=300)
    return Machine(**measured(entries.read(file)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-host", default="2,4")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--models", default="waiting,gpt")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    all_within = True
    heads = f"{'one host':>10}{'computing':>11}{'exposed':>9}{'predicted':>11}{'measured':>10}{'ratio':>7}"
    print(f"{'ms per step':30}{heads}")
    for model in args.models.split(","):
        for per_host in map(int, args.per_host.split(",")):
            all_within &= compare(per_host, model, args.rate, args.steps)
    print(f"{'all' if all_within else 'NOT all'} within {100 * (LIMIT - 1):.0f} %")
    return int(not all_within)


def compare(per_host: int, model: str, rate: str, steps: int) -> bool:
    all_within, one_host = True, [0] * (2 * per_host)
    settings = (*MODELS[model], "strategy=ddp", f"strategy.bucket_cap_mb={BUCKET_MB[model]}")
    with tempfile.TemporaryDirectory() as name, network(2, rate) as (a, b):
        folder, places = Path(name), [*[a] * per_host, *[b] * per_host]
        before = {
            algorithm: run(places, settings, algorithm, steps, folder / f"{algorithm}0")
            for algorithm in ALGORITHMS
        }
        found = run(one_host, settings, "ring", steps, folder / "one_host")
        machine, machines = (
            machine_of(one_host, folder / "here.json"),
            machine_of(places, folder / "there.json"),
        )
        computed_s = found.computed_s(machine)
        for algorithm in ALGORITHMS:
            after = run(places, settings, algorithm, steps, folder / f"{algorithm}1")
            measured_s = statistics.mean((before[algorithm].step_s, after.step_s))
            predicted = found.step(PlannedWorld(2, per_host, machines), algorithm, computed_s)
            print_row(f"{model} 2 x {per_host} {algorithm}", found.step_s, predicted, measured_s)
            all_within &= 1 / LIMIT < predicted.seconds / measured_s < LIMIT
    return all_within


def print_row(name: str, one_host_s: float, predicted: step.PredictedStep, measured_s: float) -> None:
    columns_s = (one_host_s, predicted.computed_s, predicted.exposed_s, predicted.seconds, measured_s)
    columns = "".join(
        f"{1e3 * s:>{width}.1f}" for s, width in zip(columns_s, (10, 11, 9, 11, 10), strict=True)
    )
    print(f"{name:30}{columns}{predicted.seconds / measured_s:>7.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
