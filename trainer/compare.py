"""Compares runs by their files: `python -m trainer.compare RUN RUN ... | SWEEP [--plot FILE]`.

Reads config.yaml, result.json and metrics.jsonl. The other runs are compared with the first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.sweep.comparison import compare, plot, read_runs


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m trainer.compare", description=about)
    folders = "a run directory, or the folder of a sweep"
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP", help=folders)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .png, .svg or .pdf")
    given = parser.parse_args(arguments)
    try:
        runs = read_runs(given.runs)
        print(compare(runs))
        if given.plot is not None:
            try:
                plot(runs, given.plot)
            except (OSError, ValueError) as error:  # a folder that does not exist, or an unknown ending
                raise UserError(f"--plot {given.plot}: {error}") from error
            print(given.plot)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
