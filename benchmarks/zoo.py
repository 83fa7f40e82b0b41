"""Other people's models: torchvision's classifiers, families of timm, architectures of transformers.

Of each is asked whether
  built    trainer.meta_init gives it, to the bit, the numbers that its constructor gives it for real, each
           random operation seeded as it is there; or why it was built whole
  alone    in one process, a run from the checkpoint of its first step ends with the same bits
  equal    two steps under fsdp on two ranks end where that process ends, which has their micro-batches too
  resumed  as alone, under fsdp
An answer is yes, refused (in the one line that a person gets) or WRONG; the exit status is 1 if any is wrong.

    python -m benchmarks.zoo [--only tv: hf:gpt2] [--out FILE]        needs pip install timm transformers

Equal is: no parameter differs by more than a thousandth of the largest change that the steps made to it, and
4 times the rounding of its largest number: ranks' gradients are summed in another order, and a step is small
against the number that it is added to. One that is lost, doubled or another rank's differs by all of it.
Running statistics are not compared: those of rank 0 follow its half of the data, and no training uses them.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import zoo_models
from tests.ranks import RankFailure, run_ranks
from tests.runs import job_as, settings
from trainer.errors import first_line

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


class Seeded(TorchDispatchMode):
    """Computes for real, and seeds each random operation as trainer/meta_init/recorder.py does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._num_draws = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from trainer.distributed.seeding import mixed_seed

        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            torch.default_generator.manual_seed(mixed_seed(self._seed, self._num_draws))
            self._num_draws += 1
        return func(*args, **kwargs)


def built(name: str) -> str:
    from trainer.distributed.seeding import seed_everything
    from trainer.meta_init.deferred import deferred

    model = deferred(lambda: zoo_models.build(name), seed=0)
    if model.notes:
        return f"whole: {model.notes[0].partition(': ')[2]}"
    model.fill(model.module)
    ours = _checksums(model.module)
    del model
    seed_everything(0, 0)
    with Seeded(0):
        plain = zoo_models.build(name)
    theirs = _checksums(plain)
    different = [key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)]
    return f"WRONG: {len(different)} differ, as {sorted(different)[:3]}" if different else "yes"


def _checksums(model: torch.nn.Module) -> dict[str, Any]:
    from trainer.meta_init.module_tensors import named_tensors

    return {
        name: (tensor.shape, tensor.dtype, tensor.stride(), _checksum(tensor))
        for name, tensor in named_tensors(model)
    }


def _checksum(tensor: torch.Tensor) -> int:
    from trainer.distributed.gather_shards import as_bytes

    return zlib.crc32(as_bytes(tensor))


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
    """The hash of the model in the end, and begin and end of each parameter; or how far off it is."""
    from trainer.loop import fit
    from trainer.optim.train_state import parameter_names
    from trainer.training.run_hash import parameters_sha256

    with job_as(config) as context:
        begin = {name: _whole(value) for name, value in parameter_names(context.state.model)}
        fit(context)
        found: dict[str, Any] = {}
        for name, value in parameter_names(context.state.model):
            end = _whole(value)
            found[name] = (
                (begin[name], end) if compared is None else _far(end, *compared.get(name, (end, end)))
            )
        return parameters_sha256(context.state.model), found


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _far(end: torch.Tensor, begin: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference over what is let pass: 1 is as much as may be."""
    if end.equal(right):
        return 0.0
    if not end.is_floating_point():
        return float("inf")
    rounding = 4 * torch.finfo(end.dtype).eps * right.abs().max()
    allowed = 1e-3 * (right - begin).abs().max() + rounding
    return ((end - right).abs().max() / allowed).nan_to_num(float("inf")).item()


@contextmanager
def alone() -> Iterator[None]:
    """Nobody tells this process of others."""
    from trainer.launch.place import TELLING

    told = {name: os.environ.pop(name) for name in list(os.environ) if TELLING.match(name)}
    try:
        yield
    finally:
        os.environ.update(told)


class _Refused(Exception):  # noqa: N818
    """Some rank has an answer that ends the runs of a model; the ranks are started again."""


def visit(names: Sequence[str], out: Path) -> None:
    """Try one model after the other, and write down each answer.

    Rank 0 trains it alone, while rank 1 looks at how it is built.
    """
    shared = out.parent / f"{out.name}-runs"
    for name in names:
        with tempfile.TemporaryDirectory(prefix="zoo-") as own:
            _visit(name, int(os.environ["RANK"]), Path(own), shared, out)
        shutil.rmtree(shared, ignore_errors=True)


def _visit(name: str, rank: int, own: Path, shared: Path, out: Path) -> None:
    def answer(question: str, value: str) -> None:
        with out.with_suffix(f".{rank}").open("a") as file:
            print(json.dumps([name, question, value]), file=file, flush=True)

    def asked(question: str, ask: Callable[[], Any]) -> Any:
        from trainer.errors import UserError

        try:
            return ask()
        except UserError as error:
            value = f"refused: {error}"
        except Exception as error:
            value = f"WRONG: {type(error).__name__}: {first_line(error)}"
        answer("ended", question)
        answer(question, value)
        raise _Refused

    def resumed(strategy: str, run_dir: Path) -> str:
        source = f"{run_dir}/checkpoints/step_00000001"
        return trained(configured(name, strategy, run_dir, source), {})[0]

    compared: dict[str, Any] = {}
    if rank == 1:
        answer("built", asked("built", lambda: built(name)))
    else:
        with alone():
            sha, compared = asked("alone", lambda: trained(configured(name, "single", own)))
            same = sha == asked("alone", lambda: resumed("single", own))
        answer("alone", "yes" if same else "WRONG: resumed to other bits")
    while not (other := _answers(out).get(name, {})).keys() >= {"built", "alone"}:
        time.sleep(0.05)
    if "ended" in other:
        raise _Refused
    sha, far = asked("equal", lambda: trained(configured(name, "fsdp", shared), compared))
    if rank == 0:
        worst = max(far, key=far.__getitem__)
        right = far[worst] <= 1
        answer("equal", f"yes ({far[worst]:.2g})" if right else f"WRONG: {far[worst]:.3g} in {worst}")
    same = sha == asked("resumed", lambda: resumed("fsdp", shared))
    if rank == 0:
        answer("resumed", "yes" if same else "WRONG: other bits")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="what names begin with")
    parser.add_argument("--out", type=Path, help="a file of answers, to which more are added")
    arguments = parser.parse_args()
    left = [name for name in zoo_models.names() if name.startswith(tuple(arguments.only))]
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        out = (arguments.out or Path(folder) / "answers").resolve()
        table: dict[str, dict[str, str]] = {}
        while left:
            try:
                run_ranks(visit, RANKS, left, out, init=False, timeout_s=600.0 * len(left))
            except RankFailure as failure:
                if not all("_Refused" in report for report in failure.reports.values()):
                    print(failure, file=sys.stderr, flush=True)
            before, table = len(left), _answers(out)
            done = [name for name in left if name in table]
            for name in done or left[:1]:
                table.setdefault(name, {"equal": "WRONG: the ranks ended without a word"})
                row = "  ".join(f"{key}: {value}" for key, value in table[name].items() if key != "ended")
                print(f"{name:34}", row, flush=True)
                left.remove(name)
            assert len(left) < before
    given = [(key, value) for row in table.values() for key, value in row.items() if key != "ended"]
    counts = Counter((key, re.split(":| ", value)[0]) for key, value in given)
    for (question, value), count in sorted(counts.items()):
        print(f"{question:10} {value:10} {count:4}")
    sys.exit(any(value.startswith("WRONG") for _, value in given))


def _answers(out: Path) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for rank in range(RANKS):
        file = out.with_suffix(f".{rank}")
        for line in file.read_text().splitlines() if file.exists() else ():
            name, question, value = json.loads(line)
            table.setdefault(name, {})[question] = value
    return table


if __name__ == "__main__":
    main()
