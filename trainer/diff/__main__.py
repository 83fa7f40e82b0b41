"""Find where two runs diverge, and why: `python -m trainer.diff A B [--step N] [--tolerance ULP] [--json]`.

A and B are run directories. Shows the settings, environment, code and recorded numbers that differ. Then
reruns the steps up to the first difference in both runs, and names the first thing that differs: a sample,
the output of a module, the loss, a gradient, an option of the optimizer, or an update. Does not write to A or
B. To compare the speed and the results of runs, use `python -m trainer.compare`.

Exits with status 0 if the runs are equal, 1 if they differ, and 2 after an error.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path)
    parser.add_argument("--step", type=int, metavar="N", help="step to replay (default: first to differ)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="ULP",
        help="largest difference to ignore, in units in the last place, for runs that round differently: on "
        "other hardware, on other numbers of ranks without train.exact, or with fsdp and ddp (default: 0)",
    )
    parser.add_argument(
        "--folders",
        nargs=2,
        type=Path,
        default=[Path.cwd()] * 2,
        metavar="DIR",
        help="the folders with the code of each run, if it differs (default: the current directory)",
    )
    parser.add_argument(
        "--pythons",
        nargs=2,
        default=[sys.executable] * 2,
        metavar="PYTHON",
        help="the Python interpreters for each run, if their torch versions differ (default: this one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        if (options.step is not None and options.step < 1) or not options.tolerance >= 0:
            raise UserError("--step must be at least 1, and --tolerance at least 0")
        from trainer.diff.recorded import RecordedRun

        runs = [
            RecordedRun(*each) for each in zip(options.runs, options.folders, options.pythons, strict=True)
        ]
        from trainer.diff.search import diff

        return diff(runs, options.step, options.tolerance, options.json)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception:  # Python would exit with 1, which means that the runs differ
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    sys.exit(main())
