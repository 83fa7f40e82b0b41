"""Functions for a program or a notebook that train and load models, as the commands do."""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from trainer.cli import launcher
from trainer.config import Config, flatten, load
from trainer.config.of_hydra import split_off_hydra
from trainer.config.overrides import CONF, in_words, set_to
from trainer.config.saved_run import saved_settings
from trainer.errors import NonFiniteError, RunEndError, StoppedBySignal, UserError, without_internals
from trainer.files import failure_file
from trainer.files.address import location
from trainer.files.untrusted import load_json
from trainer.files.writing import new_run_dir
from trainer.inference.restore import restored_model
from trainer.inference.trained_run import TrainedRun
from trainer.launch.fresh import launched_by
from trainer.run import run

_P = ParamSpec("_P")
_T = TypeVar("_T")
_composing = threading.Lock()  # Hydra has one state for all threads


def _without_internals(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, with the frames of this project left out of an error whose message says all."""

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _T:
        try:
            return function(*args, **named)
        except RunEndError as error:
            raise without_internals(error) from error.__cause__

    return call


@_without_internals
def train(
    overrides: Sequence[str] = (),
    processes: int | None = None,
    config_dirs: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Train as the command line would, from a program or a notebook; return the contents of result.json.

    Args:
        overrides: as on the command line, `["strategy=ddp", "optim.lr=0.01"]`.
        processes: how many to start on this host; None or 1 trains in this one, unless `overrides` name a
            launcher. A thread other than the main one always starts its own, since Python handles signals in
            the main thread only: so runs can train beside each other.
        config_dirs: folders like conf/, with your own `data/mine.yaml` and so on. They add options; of two
            with one name that of conf/ is taken.

    Raises:
        UserError: the settings are wrong, or a file cannot be read or written; a ValueError.
        NonFiniteError: the loss or a gradient was NaN or Inf; an ArithmeticError.
        StoppedBySignal: Ctrl-C or a signal; the run is saved, and its run_dir with resume=auto continues it.
        RuntimeError: a fault in the started processes. A fault in this one is raised as it is.

    The first three are in `trainer.errors`; each says in one line what to do.
    """
    if isinstance(overrides, str):
        raise UserError(
            f"overrides is the string {overrides!r}, but must be a list of strings: [{overrides!r}]"
        )
    overrides = [*overrides, *searched(config_dirs)]
    if processes is not None and processes != 1:
        overrides += ["launch=local", f"launch.processes={processes}"]
    settings = composed(overrides)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if launcher(settings.launch) is None and not in_main_thread and launched_by() is None:
        overrides += ["launch=local", "launch.processes=1"]
        settings = composed(overrides)
    launch = launcher(settings.launch)
    if launch is None:
        return run(settings)
    _refuse_classes_of_main(settings)
    if not settings.launch.chunks_result:
        raise UserError(
            "launch.dry_run=true and launch.wait=false leave no result to return; use them on a command "
            "line: ringmaster launch=slurm ..."
        )
    settings.run_dir = settings.run_dir or str(new_run_dir())  # else the launcher would choose another
    run_dir = Path(settings.run_dir)
    written_at = failure_file.written_at(run_dir)
    status, message = launch(settings, [*overrides, set_to("run_dir", settings.run_dir)])
    if status:
        raise _end(status, message, run_dir, written_at)
    return load_json(run_dir / "result.json")


@_without_internals
def load_model(run_dir: str | Path, checkpoint: str | Path = "newest") -> nn.Module:
    """Return the model of a run with the weights of a checkpoint, on the CPU and in evaluation mode.

    If the run evaluates moving averages instead (`ema.evaluate=ema`), with those.

    Args:
        run_dir: the directory of the run, or its address. The model is built as its config.yaml says, whose
            classes are called.
        checkpoint: newest (that verifies), best (by the run's `checkpoint.keep_best`), or the path of one.

    Raises:
        UserError: the run or the checkpoint does not exist, is broken, or does not fit the model's class.
    """
    return restored_model(saved_settings(location(run_dir)), str(checkpoint))


@_without_internals
def open(run_dir: str | Path, checkpoint: str | Path = "newest") -> TrainedRun:
    """Return a trained run: its `model`, and `predict(samples)`, without its training data.

    The arguments and errors are those of `load_model`.
    """
    config = saved_settings(location(run_dir))
    return TrainedRun(config, restored_model(config, str(checkpoint)))


def composed(overrides: list[str]) -> Config:
    """The settings of conf/ with `overrides`. UserError: they cannot be composed, or are invalid."""
    try:
        with _composing, initialize_config_dir(str(CONF), version_base="1.3"):
            return load(split_off_hydra(compose("train", overrides=overrides, return_hydra_config=True)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(in_words(error)) from error


def searched(config_dirs: Sequence[str | Path]) -> list[str]:
    """The override that has Hydra search these folders before conf/, here and in launched processes."""
    if isinstance(config_dirs, str | Path):
        config_dirs = [config_dirs]
    folders = [Path(each).resolve() for each in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"config_dirs names {folder}, which is not a folder; give folders like conf/")
    quoted = ",".join(QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders)
    return [f"hydra.searchpath=[{quoted}]"] if folders else []


def _refuse_classes_of_main(settings: Config) -> None:
    for name, value in flatten(settings).items():
        if isinstance(value, str) and value.startswith("__main__."):
            word = value.rpartition(".")[2]
            raise UserError(
                f"{name} is {value}, of this notebook or script: the processes of the run cannot import it. "
                f"Write it to a file in this folder, such as mine.py, and set {name}=mine.{word}; or train "
                "in this process: from the main thread, without processes= and launch="
            )


def _end(status: int, message: str | None, run_dir: Path, written_at: int | None) -> Exception:
    """The exception with which the run would have ended in this process.

    Args:
        written_at: the time of an earlier failure.json, if there was one.
    """
    is_new = failure_file.written_at(run_dir) != written_at
    found = (failure_file.read(run_dir) if is_new else None) or {}
    message = found.get("message") or message or f"the run ended with status {status}; see its output"
    if status == StoppedBySignal.exit_code and isinstance(found.get("step"), int):
        return StoppedBySignal(found["step"], run_dir)
    for kind in (UserError, NonFiniteError):
        if status == kind.exit_code:
            return kind(message)
    return RuntimeError(message)
