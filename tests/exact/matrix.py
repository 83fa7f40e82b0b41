"""Runs with `train.exact=8` and any strategy, and their final hashes."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import runs
from tests.failures.test_ends import refusals
from tests.ranks import run_ranks

LEAVES = 8
COMMON = (
    *(f"train.exact={LEAVES}", "train.max_steps=20", "train.log_every_steps=2", "train.clip_grad_norm=0.5"),
    "train.eval_every_epochs=100",  # at the end
    *("checkpoint.every_epochs=null", "distributed.timeout_s=100", "schedule=constant"),
)
NOISY = (
    *("data.dataset._target_=tests.checkpoint.noisy.Noisy", "~model.input_shape", "~model.hidden"),
    *("model._target_=tests.checkpoint.noisy.DropoutNet", "train.global_batch_size=24", "train.epochs=30"),
)
MODELS = {
    # dropout, a buffer that forward changes; with batch norm
    "mlp": (*NOISY, "+model.norm=false"),
    "norm": NOISY,
    "resnet": (
        *("model._target_=tests.exact.small_resnet.SmallResNet", "~model.input_shape", "~model.hidden"),
        "train.global_batch_size=64",
    ),
    "gpt": (
        *("data=text", "model=gpt", "data.dataset.block_size=16", "model.width=32", "model.depth=2"),
        *(
            "model.num_heads=2",
            "model.dropout=0.1",
            "train.global_batch_size=16",
            "train.eval_every_epochs=0",
        ),
    ),
}
OPTIMIZERS = {"adamw": ("optim=adamw", "optim.lr=0.01"), "sgd": ("optim=sgd", "optim.lr=0.1")}
FIGURES = ("param_sha256", "train/loss", "eval/loss", "eval/accuracy")


def trained_each(*all_overrides: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the results that must be equal, of consecutive runs in these ranks."""
    with contextlib.redirect_stdout(io.StringIO()):
        results = [runs.train(*overrides) for overrides in all_overrides]
    return [tuple(result.get(name) for name in FIGURES) for result in results]


def figures(root: Path, world: int, *cases: tuple[str, ...], **options: Any) -> list[tuple[Any, ...]]:
    """Return the results of `cases`, each a run of `world` ranks with these settings in addition to COMMON."""
    each = [(*COMMON, f"run_dir={root / str(number)}", *case) for number, case in enumerate(cases)]
    return run_ranks(trained_each, world, *each, init=False, **options)[0]


def matrix(
    root: Path, model: str, optimizer: str, comms: Mapping[int, Sequence[str]], steps: int = 20
) -> dict[str, tuple[Any, ...]]:
    """Return the results of a model with single, with ddp and `comms` for each world size, and with fsdp."""
    words = (*MODELS[model], *OPTIMIZERS[optimizer], f"train.max_steps={steps}")
    found = {"single": figures(root / "1", 1, (*words, "strategy=single"))[0]}
    for world, names in comms.items():
        cases = {f"ddp {world} {comm}": (*words, "strategy=ddp", f"comm={comm}") for comm in names}
        if LEAVES % world == 0:
            cases[f"fsdp {world}"] = (*words, "strategy=fsdp")
        hosts = [0, 0, 1, 1] if world == 4 else None
        each = figures(root / str(world), world, *cases.values(), hosts=hosts, timeout_s=600)
        found |= dict(zip(cases, each, strict=True))
    return found


def refused_each(*all_overrides: tuple[str, ...]) -> list[str]:
    """Return the errors of runs that are not allowed."""
    return refusals(*((*COMMON, *overrides) for overrides in all_overrides))
