"""Which launcher starts the processes of a run."""

from collections.abc import Callable, Sequence

from trainer.config import Config, LaunchConfig
from trainer.launch import local, slurm
from trainer.launch.fresh import launched_by

LAUNCHERS = {"local": local.launch, "slurm": slurm.launch}


def launcher(settings: LaunchConfig) -> Callable[[Config, Sequence[str]], int] | None:
    """Starts the run with a command line, and returns its exit status; None to run in this process.

    A process that a launcher started is one of the run's, and starts none.
    """
    return None if launched_by() else LAUNCHERS.get(settings.name)
