"""The command line: compose the settings, then launch the run or join it as a rank."""

import contextlib
import functools
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer import config
from trainer.config.hydra_settings import apply_hydra_settings
from trainer.config.overrides import CONF, EACH_TRIAL_LAUNCHES, explain
from trainer.errors import UserError
from trainer.launch import local, slurm
from trainer.launch.exits import ends_its_threads, exits
from trainer.launch.new_process import (
    die_with_parent,
    extend_path,
    launched_by,
    raise_file_limit,
    remember_script,
)
from trainer.launch.rank_info import publish, rank_info

Launch = Callable[[config.Config, Sequence[str]], tuple[int, str | None]]
LAUNCHERS: dict[str, Launch] = {"local": local.launch, "slurm": slurm.launch}


@ends_its_threads()
def main() -> None:
    """Run the command line `sys.argv` as a Hydra application, and exit with the status of the run."""
    die_with_parent()
    remember_script()
    extend_path()
    with exits():
        raise_file_limit()
        composed = compose()
        if len(composed) > 1:
            raise UserError(f"hydra/sweeper: {EACH_TRIAL_LAUNCHES}")
        for settings in composed:
            start(config.load(settings), sys.argv[1:])


def compose() -> list[DictConfig]:
    """Compose the settings of the command line. Return [] after a sweep or an option such as --help.

    The run starts after Hydra's main function has returned, because Hydra shortens the tracebacks of errors
    that are raised inside it.
    """
    composed: list[DictConfig] = []
    shown: list[Any] = []

    def ringmaster(settings: DictConfig) -> None:
        composed.append(settings)
        shown.append(HydraConfig.instance().cfg)

    # Hydra's parser requires overrides to be contiguous: move options such as --config-dir to the end.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: not re.match(r"~|\+*[\w$][\w./@$-]*=", word))
    wanted = os.environ.get("HYDRA_FULL_ERROR")
    if any(re.match(r"--(help|hydra-help|cfg|info|version)|-[hci]", word) for word in sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently when `| head` closes the pipe
    # Otherwise, Hydra would print errors itself, on every rank, and hide their tracebacks from torchrun.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(ringmaster)()
    except Exception as error:
        if isinstance(error, HydraException | OmegaConfBaseException) or not _is_from_hydra(error):
            raise
        groups = [each for each in sys.argv[1:] if "=" in each and (CONF / each.partition("=")[0]).is_dir()]
        what = " ".join(groups) or "the command line"
        raise UserError(f"{what} cannot be composed: {explain(error)}") from error
    finally:  # launched processes would inherit the variable, and print tracebacks instead of messages
        os.environ.pop("HYDRA_FULL_ERROR")
        if wanted is not None:
            os.environ["HYDRA_FULL_ERROR"] = wanted
    for settings, hydra_settings in zip(composed, shown, strict=True):
        apply_hydra_settings(settings, hydra_settings)
    return composed


def _is_from_hydra(error: Exception) -> bool:
    *_, last = traceback.walk_tb(error.__traceback__)
    return str(last[0].f_globals.get("__name__")).startswith(("hydra.", "yaml."))


def launcher(settings: config.LaunchConfig) -> Launch | None:
    """Return the function that launches the run; None if the run uses this process."""
    return None if launched_by() else LAUNCHERS.get(settings.name)


def start(settings: config.Config, argv: list[str]) -> dict[str, Any] | None:
    """Run in this process and return the contents of result.json, or launch processes and return None."""
    if (launch := launcher(settings.launch)) is not None:
        config.check_processes(settings)
        if status := launch(settings, argv)[0]:
            sys.exit(status)
        return None
    here = rank_info(settings.distributed)
    publish(here)
    if here.rank == 0:  # before the import of torch, which takes seconds
        print(banner(here.world_size), flush=True)
    return loaded_run()(settings)  # loads torch only after the settings are checked


def banner(num_processes: int) -> str:
    """Return the first line of a run's output: versions and number of processes."""
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):  # a clone that is not installed
        version = f" {metadata.version('ringmaster-trainer')}"
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return f"Ringmaster{version}, torch {metadata.version('torch')}, {processes}"


@functools.cache  # a second gc.freeze would also freeze objects created since the first
def loaded_run() -> Callable[[config.Config], dict[str, Any]]:
    """Import the modules that a first step needs, and return `trainer.run.run`.

    Garbage collection is disabled during the imports: their objects are never freed, and collecting would
    take a fifth of the start-up time.
    """
    gc.disable()
    from trainer.run import run
    from trainer.torch_private import load_compiler

    gc.freeze()
    # An optimizer, DDP or DTensor would import the compiler later. Its objects must not be frozen, because
    # Triton would report them as leaks at exit.
    load_compiler()
    gc.enable()
    return run
