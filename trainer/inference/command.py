"""The command line for trained models: `python -m trainer.COMMAND RUN [OPTIONS] [OVERRIDES]`.

Does not import torch, so that user errors are reported before torch is loaded.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from trainer.config import Config
from trainer.config.saved_run import MAY_CHANGE, MAY_CHANGE_STEPS, saved_settings
from trainer.errors import UserError
from trainer.files.address import location
from trainer.launch import local
from trainer.launch.exits import ends_its_threads, exits
from trainer.launch.new_process import die_with_parent, extend_path, launched_by, raise_file_limit
from trainer.launch.rank_info import publish, rank_from_environment, rank_info


def arguments(module: str, description: str | None, trains: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all commands; without `--checkpoint` if `trains` is true."""
    may_change = MAY_CHANGE_STEPS if trains else MAY_CHANGE
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=location, help="the run directory, or its address")
    if not trains:
        parser.add_argument(
            "--checkpoint",
            default="newest",
            metavar="newest|best|PATH",
            help="best: by the run's checkpoint.keep_best; PATH: the path of a checkpoint, or its name in "
            "the run (default: newest)",
        )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDES",
        help=f"settings to override, such as strategy=fsdp launch=local; allowed: {', '.join(may_change)}",
    )
    return parser


@ends_its_threads()
def start(
    module: str, parser: argparse.ArgumentParser, do: Callable[[Any, Config], None], trains: bool = False
) -> None:
    """Parse the command line and call `do` with the options and the run's settings; see `saved_settings`.

    With launch=local, `do` is called in separate processes. Exits with status 2 for a user error, 130 for
    Ctrl-C, and 143 for SIGTERM; partial output is removed.
    """
    die_with_parent()
    extend_path()
    options = parser.parse_intermixed_args()
    try:
        with exits():
            raise_file_limit()
            config = saved_settings(options.run, options.overrides, trains)
            if config.launch.in_cluster:
                raise UserError(
                    f"launch={config.launch.name} is not supported by this command; use launch=local, or run "
                    f"[srun] python -m {module} {options.run} in your own job"
                )
            if config.launch.name == "local" and launched_by() is None:
                sys.exit(local.launch(config, sys.argv[1:], module)[0])
            info = rank_info(config.distributed)
            publish(info)
            if info.rank == 0:  # rank 0 writes files, and must remove partial ones
                signal.signal(signal.SIGTERM, _interrupt)
            do(options, config)
    except KeyboardInterrupt as interrupt:
        (number,) = interrupt.args or (signal.SIGINT,)
        if number == signal.SIGINT and not rank_from_environment():
            print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + number)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)  # like Ctrl-C, this is not reported as a failure of this rank
