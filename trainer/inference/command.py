"""The command line of commands after training: `python -m trainer.COMMAND RUN [OPTIONS] [OVERRIDES]`.

Does not import torch, so that a user error is reported before torch has loaded.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from trainer.config import Config
from trainer.config.saved_run import MAY_CHANGE, saved_settings
from trainer.errors import UserError
from trainer.files.address import location
from trainer.launch import local
from trainer.launch.exits import ends_its_threads, exits
from trainer.launch.fresh import die_with_parent, extend_path, launched_by, take_limits
from trainer.launch.rank_info import publish, rank_from_environment, rank_info


def arguments(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of all commands; add options to it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=location, help="the directory of a run, or its address")
    parser.add_argument(
        "--checkpoint",
        default="newest",
        metavar="newest|best|PATH",
        help="best: by the run's checkpoint.keep_best; PATH: a checkpoint's path, or its name in the run",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDES",
        help=f"settings that replace the run's: strategy=fsdp launch=local; allowed: {', '.join(MAY_CHANGE)}",
    )
    return parser


@ends_its_threads()
def start(module: str, parser: argparse.ArgumentParser, do: Callable[[Any, Config], None]) -> None:
    """Call `do` with the options and the run's settings; with launch=local, in separate processes.

    Exits with status 2 for a user error, 130 for Ctrl-C, and 143 for SIGTERM; partial output is removed.
    """
    die_with_parent()
    extend_path()
    options = parser.parse_intermixed_args()
    try:
        with exits():
            take_limits()
            config = saved_settings(options.run, options.overrides)
            if config.launch.in_cluster:
                raise UserError(
                    f"launch={config.launch.name} is for training; in a job of your own, use "
                    f"python -m {module} {options.run}, after srun under SLURM; or use launch=local"
                )
            if config.launch.name == "local" and launched_by() is None:
                sys.exit(local.launch(config, sys.argv[1:], module)[0])
            here = rank_info(config.distributed)
            publish(here)
            if here.rank == 0:  # it writes files: remove partial ones
                signal.signal(signal.SIGTERM, _end)
            do(options, config)
    except KeyboardInterrupt as ended:
        (number,) = ended.args or (signal.SIGINT,)
        if number == signal.SIGINT and not rank_from_environment():
            print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + number)


def _end(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)  # as by Ctrl-C: not a failure of this rank
