"""Test third-party models: torchvision's classifiers, families of timm, architectures of transformers.

Answers these questions for each model:

    built    Can it be built on the meta device? If not, the reason why ranks build the whole model.
    alone    Does a run in one process that is resumed from its first step end with the same bits?
    equal    Do two steps with FSDP on two ranks give the same model as one process?
    resumed  Does a resumed run with FSDP end with the same bits?

An answer is yes, refused (with the message for users) or WRONG. The exit status is 1 if any answer is WRONG.

    python -m benchmarks.zoo [--only tv: hf:gpt2] [--out FILE]        requires pip install timm transformers

Models are equal if no parameter differs by more than a thousandth of its largest change in these steps plus 4
times the rounding error of its largest value. This allows for the different order of sums over ranks; a lost,
doubled or wrong gradient differs by the whole change. Running statistics are not compared: on rank 0 they
depend on its half of the data, and training does not use them.
"""

import argparse
import dataclasses
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks import zoo_models
from benchmarks.visits import Answers, Refused, read, visit_each
from tests.runs import job_as, settings

STEPS, RANKS = 2, 2
WORDS = (
    "model._target_=benchmarks.zoo_models.build",
    "+model.name=",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "data=fake",
    "optim.lr=0.05",
    "optim.momentum=0",
    "schedule=constant",
    f"train.global_batch_size={zoo_models.GLOBAL_BATCH}",
    f"train.micro_batch_size={zoo_models.GLOBAL_BATCH // RANKS}",
    f"train.max_steps={STEPS}",
    "train.eval_every_epochs=0",
    "checkpoint.every_steps=1",
    "checkpoint.every_epochs=null",
    "distributed.timeout_s=120",
    "logger=jsonl",
)


def built(name: str) -> str:
    from trainer.strategies.meta_init import on_meta

    model, why = on_meta(lambda: zoo_models.build(name), seed=0)
    return f"whole: {why}" if model is None else "yes"


def configured(name: str, strategy: str, run_dir: Path, resume: str | None = None) -> Any:
    config = settings(f"strategy={strategy}", *WORDS)
    micro_batches_of = RANKS if strategy == "single" else 1
    samples = {
        "_target_": "benchmarks.zoo_models.Samples",
        "name": name,
        "micro_batches_of": micro_batches_of,
    }
    return dataclasses.replace(
        config,
        run_dir=str(run_dir),
        resume=resume,
        model=config.model | {"name": name},
        data=dataclasses.replace(config.data, dataset=samples, task=zoo_models.task(name)),
    )


def trained(config: Any, compared: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the final hash, and initial and final parameters or, with `compared`, differences."""
    from trainer.loop import fit
    from trainer.model.plain_names import parameter_names
    from trainer.report.run_hash import parameters_sha256

    with job_as(config) as context:
        begin = {name: _whole(value) for name, value in parameter_names(context.state.model)}
        fit(context)
        found: dict[str, Any] = {}
        for name, value in parameter_names(context.state.model):
            end = _whole(value)
            found[name] = (
                (begin[name], end)
                if compared is None
                else _relative_difference(end, *compared.get(name, (end, end)))
            )
        return parameters_sha256(context.state.model), found


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _relative_difference(end: torch.Tensor, begin: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference divided by the allowed difference."""
    if end.equal(right):
        return 0.0
    if not end.is_floating_point():
        return float("inf")
    rounding = 4 * torch.finfo(end.dtype).eps * right.abs().max()
    allowed = 1e-3 * (right - begin).abs().max() + rounding
    return ((end - right).abs().max() / allowed).nan_to_num(float("inf")).item()


@contextmanager
def alone() -> Iterator[None]:
    """Remove the environment variables of the launcher within the context."""
    from trainer.launch.rank_info import RANK_VARIABLES

    removed = {name: os.environ.pop(name) for name in list(os.environ) if RANK_VARIABLES.match(name)}
    try:
        yield
    finally:
        os.environ.update(removed)


def visit(out: Path, answers: Answers, name: str) -> None:
    """Train a model on rank 0 while rank 1 checks how it is built, then train it on both."""
    rank, shared = int(os.environ["RANK"]), out.parent / f"{out.name}-runs"

    def resumed(strategy: str, run_dir: Path) -> str:
        source = f"{run_dir}/checkpoints/step_00000001"
        return trained(configured(name, strategy, run_dir, source), {})[0]

    compared: dict[str, Any] = {}
    if rank == 1:
        answers.give("built", answers.result_of("built", lambda: built(name)))
    else:
        with alone(), tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            own = Path(folder)
            sha, compared = answers.result_of("alone", lambda: trained(configured(name, "single", own)))
            same = sha == answers.result_of("alone", lambda: resumed("single", own))
        answers.give("alone", "yes" if same else "WRONG: different bits after a resume")
    while not (so_far := read(out).get(name, {})).keys() >= {"built", "alone"}:
        time.sleep(0.05)
    if "ended" in so_far:
        raise Refused
    sha, differences = answers.result_of("equal", lambda: trained(configured(name, "fsdp", shared), compared))
    if rank == 0:
        worst = max(differences, key=differences.__getitem__)
        right = differences[worst] <= 1
        answers.give(
            "equal",
            f"yes ({differences[worst]:.2g})" if right else f"WRONG: {differences[worst]:.3g} in {worst}",
        )
    same = sha == answers.result_of("resumed", lambda: resumed("fsdp", shared))
    if rank == 0:
        answers.give("resumed", "yes" if same else "WRONG: different bits after a resume")
        shutil.rmtree(shared, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of names")
    parser.add_argument("--timeout-s", type=float, default=600, help="time limit for one model in seconds")
    parser.add_argument("--out", type=Path, help="prefix of the files for answers, FILE.0 and so on, by rank")
    arguments = parser.parse_args()
    names = [name for name in zoo_models.names() if name.startswith(tuple(arguments.only))]
    given: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        out = (arguments.out or Path(folder) / "answers").resolve()
        known = read(out)
        left = [each for each in names if each not in known]
        for name in visit_each(partial(visit, out), RANKS, left, out, arguments.timeout_s):
            row = {key: value for key, value in read(out)[name].items() if key != "ended"}
            print(f"{name:34}", "  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        given = [pair for name in names for pair in read(out)[name].items() if pair[0] != "ended"]
    counts = Counter((key, re.split(":| ", value)[0]) for key, value in given)
    for (question, value), count in sorted(counts.items()):
        print(f"{question:10} {value:10} {count:4}")
    sys.exit(any(value.startswith("WRONG") for _, value in given))


if __name__ == "__main__":
    main()
