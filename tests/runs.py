"""Runs of the trainer in tests, with settings composed as in train.py, on ranks of tests.ranks."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer import config

if TYPE_CHECKING:
    from trainer.context import Run

_T = TypeVar("_T")
# An override of a value that Hydra's grammar reads in the same way at any position.
_VALUE = re.compile(r"(?!hydra\.)[a-z_]+(\.\w+)+=([\w.-]+|\[[\w.,-]*\])")
# What may be set past Hydra: a path that its grammar takes as it is.
_PLACE = re.compile(r"(run_dir|resume)=[A-Za-z_/][A-Za-z0-9_/.-]*")
CONF = Path(__file__).parents[1] / "conf"
TORCH_2_14 = hasattr(torch.distributed, "all_gather_single")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Return `composed(*overrides)` in a fifth of its time: most overrides are composed once per session, and
    the values at the end are set as Hydra sets them."""
    # Hydra takes these first, at any position.
    groups = [word for word in overrides if (CONF / word.partition("=")[0]).is_dir()]
    others = [word for word in overrides if word not in groups]
    plain = list(itertools.takewhile(_VALUE.fullmatch, reversed(others)))
    values, first = plain[::-1], [*groups, *others[: len(others) - len(plain)]]
    found = _once_in_a_session(f"before load: {first}", lambda: composed(*first))
    try:
        for value in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(found, value.key_or_group, value.value(), merge=True)
    except OmegaConfBaseException:
        return composed(*overrides)  # with Hydra's own message
    return found


def settings(*overrides: str) -> config.Config:
    """Return the settings for `overrides`; compose once per session if only run_dir and resume differ."""
    own = {word.partition("=")[0]: word.partition("=")[2] for word in overrides if _PLACE.fullmatch(word)}
    common = tuple(word for word in overrides if not _PLACE.fullmatch(word))
    found = _once_in_a_session(repr(common), lambda: config.load(_composed(common)))
    places = {name: None if value == "null" else value for name, value in own.items()}
    return dataclasses.replace(found, **places)


def _once_in_a_session(name: str, make: Callable[[], _T]) -> _T:
    """Return the result of `make`, called once per session; concurrent calls wait for the first."""
    folder = Path(os.environ.get("RINGMASTER_TESTS_SETTINGS", os.devnull))
    if not folder.is_dir():
        return make()
    known = folder / hashlib.sha256(name.encode()).hexdigest()
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            part = known.with_suffix(".part")  # its writer may be killed
            part.write_bytes(pickle.dumps(make()))
            part.rename(known)
    return cast(_T, pickle.loads(known.read_bytes()))


def train(*overrides: str) -> dict[str, Any]:
    """Run in this process, which may be a rank, and return the contents of result.json."""
    from trainer.run import run  # only here: composing settings does not need it

    torch.set_num_threads(1)
    return run(settings(*overrides))


def whole_and_resumed(folder: Path, at: int, *overrides: str) -> list[Any]:
    """Return the hash, and the metrics after step `at`, of a run that saves there and of a run resumed there."""
    found = []
    for name, resume in ("whole", "null"), ("resumed", f"{folder}/whole/checkpoints/step_{at:08d}"):
        place = f"run_dir={folder}/{name}"
        made = train(*overrides, "checkpoint.keep_last=9", f"resume={resume}", place)
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        logged = [line for line in lines if line["step"] > at and "train/loss" in line]
        numbers = [{key: line[key] for key in line if key.startswith("train/")} for line in logged]
        found.append((made["param_sha256"], numbers))
    return found


@contextmanager
def context_of(*overrides: str) -> Iterator[Run]:
    """Assemble a run in this process, and release it at the end."""
    with job_as(settings(*overrides)) as context:
        yield context


@contextmanager
def job_as(config: config.Config) -> Iterator[Run]:
    """Assemble a run from composed settings."""
    from trainer.assemble import assemble
    from trainer.distributed.process_group import watched_process_group
    from trainer.launch.signals import StopRequest

    torch.set_num_threads(1)
    if config.run_dir is not None:  # `run` claims it; a test only needs it to be there
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop_request, watched_process_group(config.distributed) as (ranks, watch):
        context = assemble(config, "tests", ranks, stop_request, watch.ending.save)
        context.report.run_log.open()
        yield context
        context.checkpointer.saving.wait()
        context.vote.close()
        context.strategy.close()
        context.report.run_log.close()


def steps_of(run: Run) -> Iterator[None]:
    """Make the steps of a run without evaluations, logs and saves, and yield after each."""
    from trainer.dry_run.step import dry_run
    from trainer.loop import is_over, make_step, open_epoch

    progress, batches = run.state.progress, open_epoch(run)
    assert batches is not None
    run.model.train()
    dry_run(run, batches)
    while not is_over(run):
        epoch = progress.epoch
        make_step(run, batches)
        yield
        if progress.epoch != epoch and not is_over(run):
            batches = open_epoch(run)
            assert batches is not None


def trained(*overrides: str) -> dict[str, Tensor]:
    """Train to the last step, and return this rank's full parameters and buffers."""
    from trainer.loop import fit

    with context_of(*overrides) as context:
        fit(context)
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in context.state.model.state_dict().items()
        }
