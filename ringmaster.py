"""The command `ringmaster`; `python train.py` and `python -m trainer` are the same."""

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Train as the command line says."""
    for name in ("trainer", "models"):
        found = import_module(name).__file__  # None: a folder without __init__.py
        if found is None or Path(found).resolve().parent != HERE / name:
            where = Path(found).parent if found else "a folder of that name"
            print(
                f"`import {name}` finds {where} before ringmaster's own package, {HERE / name}: give yours "
                "another name, or start where it is not on the path (PYTHONPATH, the current directory)",
                file=sys.stderr,
            )
            sys.exit(2)
    from trainer.command import main

    main()


if __name__ == "__main__":
    main()
