"""The Python API: train and load models from a program or a notebook."""

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
from trainer.config.hydra_settings import separate_hydra_settings
from trainer.config.overrides import CONF, explain, set_to
from trainer.config.saved_run import saved_settings
from trainer.errors import NonFiniteError, RunEndError, StoppedBySignal, UserError, without_internals
from trainer.files import failure_file
from trainer.files.address import location
from trainer.files.untrusted import load_json
from trainer.files.writing import new_run_dir
from trainer.inference.restore import restored_model
from trainer.inference.trained_run import TrainedRun
from trainer.launch.new_process import launched_by
from trainer.run import run

_P = ParamSpec("_P")
_T = TypeVar("_T")
_composing = threading.Lock()  # Hydra's state is global


def _without_internals(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `function` so that tracebacks of a RunEndError omit this project's frames."""

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
    """Train like the command line, and return the contents of result.json.

    Args:
        overrides: settings as on the command line, such as `["strategy=ddp", "optim.lr=0.01"]`.
        processes: the number of processes to start on this host. None or 1 trains in the current process,
            unless `overrides` select a launcher. Outside the main thread, training always starts new
            processes, because Python handles signals only in the main thread; several threads can train at
            the same time.
        config_dirs: folders structured like conf/, for example with your own `data/mine.yaml`. Ringmaster's
            own files take precedence.

    Raises:
        UserError: if a setting is wrong, or a file cannot be read or written; a subclass of ValueError.
        NonFiniteError: if the loss or a gradient is NaN or Inf; a subclass of ArithmeticError.
        StoppedBySignal: on Ctrl-C or a signal, after saving. To continue, set its run_dir and resume=auto.
        RuntimeError: if a started process failed. Errors in the current process are raised unchanged.

    The first three classes are in `trainer.errors`.
    """
    if isinstance(overrides, str):
        raise UserError(
            f"overrides must be a list of strings, but is the string {overrides!r}; pass [{overrides!r}]"
        )
    overrides = [*overrides, *search_path(config_dirs)]
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
    if not settings.launch.returns_result:
        raise UserError(
            "launch.dry_run=true and launch.wait=false are not supported by trainer.train, because they "
            "return no result; use them on the command line: ringmaster launch=slurm ..."
        )
    settings.run_dir = settings.run_dir or str(new_run_dir())  # otherwise the launcher would choose one
    run_dir = Path(settings.run_dir)
    written_at = failure_file.written_at(run_dir)
    status, message = launch(settings, [*overrides, set_to("run_dir", settings.run_dir)])
    if status:
        raise _failure(status, message, run_dir, written_at)
    return load_json(run_dir / "result.json")


@_without_internals
def load_model(run_dir: str | Path, checkpoint: str | Path = "newest") -> nn.Module:
    """Return the model of a run with the weights of a checkpoint, on the CPU and in evaluation mode.

    If the run evaluates only moving averages (`ema.evaluate=ema`), they are used in place of the weights.

    Args:
        run_dir: the run directory, a path or a URL. It must be trusted, because the classes named in its
            config.yaml are called.
        checkpoint: newest (the newest intact checkpoint), best (by the run's `checkpoint.keep_best`), or a
            path.

    Raises:
        UserError: if the run or the checkpoint does not exist, is damaged, or does not match the model.
    """
    return restored_model(saved_settings(location(run_dir)), str(checkpoint))


@_without_internals
def open(run_dir: str | Path, checkpoint: str | Path = "newest") -> TrainedRun:
    """Return a trained run with its `model` and the method `predict(samples)`, without loading training data.

    See `load_model` for arguments and errors.
    """
    config = saved_settings(location(run_dir))
    return TrainedRun(config, restored_model(config, str(checkpoint)))


def composed(overrides: list[str]) -> Config:
    """Compose the settings of conf/ with `overrides`, and check them. Raises UserError for a mistake."""
    try:
        with _composing, initialize_config_dir(str(CONF), version_base="1.3"):
            return load(
                separate_hydra_settings(compose("train", overrides=overrides, return_hydra_config=True))
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def search_path(config_dirs: Sequence[str | Path]) -> list[str]:
    """Return an override that adds `config_dirs` to Hydra's search path, in launched processes, too."""
    if isinstance(config_dirs, str | Path):
        config_dirs = [config_dirs]
    folders = [Path(each).resolve() for each in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"config_dirs contains {folder}, which is not a folder; pass folders structured like conf/"
            )
    quoted = ",".join(QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders)
    return [f"hydra.searchpath=[{quoted}]"] if folders else []


def _refuse_classes_of_main(settings: Config) -> None:
    for name, value in flatten(settings).items():
        if isinstance(value, str) and value.startswith("__main__."):
            class_name = value.rpartition(".")[2]
            raise UserError(
                f"{name}={value} is defined in this notebook or script, so other processes cannot import it. "
                "Move it to a file in the current folder, such as mine.py, and set "
                f"{name}=mine.{class_name}; or train in this process, from the main thread and without "
                "processes= and launch="
            )


def _failure(status: int, message: str | None, run_dir: Path, written_at: int | None) -> Exception:
    is_new = failure_file.written_at(run_dir) != written_at
    failure = (failure_file.read(run_dir) if is_new else None) or {}
    message = failure.get("message") or message or f"the run ended with status {status}; see its output"
    if status == StoppedBySignal.exit_code and isinstance(failure.get("step"), int):
        return StoppedBySignal(failure["step"], run_dir)
    for kind in (UserError, NonFiniteError):
        if status == kind.exit_code:
            return kind(message)
    return RuntimeError(message)
