"""Inspect, verify and convert checkpoints.

Needs neither a GPU nor a process group, and never runs code from a checkpoint.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.convert import FORMATS, convert
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, verified
from trainer.distributed.backend_flags import DTYPES
from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import first_five, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return exit status 0, or 2 if a checkpoint is damaged or an argument is wrong."""
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in (
        ("show", "print and verify a checkpoint, or every checkpoint of a run"),
        ("verify", "check every file against its sha256; the exit status is 0 if all are intact"),
        ("convert", "export the weights of a checkpoint, or of the newest one of a run, for other programs"),
    ):
        command = commands.add_parser(name, help=help)
        help = "a checkpoint or a run: its path, or an address such as s3://..."
        command.add_argument("directory", type=location, help=help)
        if name == "convert":
            command.add_argument("out", type=Path, help="the output file or folder; must not exist")
            command.add_argument("--to", required=True, choices=FORMATS, help="the output format")
            command.add_argument(
                "--ema", action="store_true", help="export the moving averages of the weights"
            )
            command.add_argument(
                "--dtype", choices=DTYPES, help="dtype of the exported weights (default: as saved)"
            )
    chosen = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # for ASCII terminals
    try:
        if chosen.command == "convert":
            source = _newest(chosen.directory)
            convert(source, chosen.out, chosen.to, chosen.ema, DTYPES.get(chosen.dtype))
            print(f"exported {printable(source)} to {printable(chosen.out)}")
            return 0
        reports = [
            _report(path, chosen.command == "show", is_listed=path != chosen.directory)
            for path in _checkpoints(chosen.directory)
        ]
    except (UserError, RetryableError, OSError) as error:
        print(error, file=sys.stderr)
        return kind_of(error).exit_code
    return 0 if all(reports) else UserError.exit_code


def _checkpoints(directory: Location) -> Iterator[Location]:
    """Yield `directory` or, if it is a run or the `checkpoints` folder of a run, the checkpoints in it."""
    if (directory / MANIFEST).exists() or not directory.is_dir():
        yield directory
        return
    if not (directories := _listing(directory).directories()):
        raise UserError(
            f"{printable(directory)} is not a checkpoint (it has no {MANIFEST}), and contains none"
        )
    yield from directories


def _newest(directory: Location) -> Location:
    *_, last = _checkpoints(directory)
    return directory if last == directory else next(iter(_listing(directory).own()), last)


def _listing(directory: Location) -> Listing[Any]:
    inner = directory / "checkpoints"
    return Listing(inner if inner.is_dir() else directory)


def _report(directory: Location, in_full: bool, is_listed: bool) -> bool:
    """Print a report on one checkpoint; return False if it is damaged or unreadable.

    At a URL, a checkpoint without a manifest may still be uploading, so it does not count as damaged.
    """
    try:
        source = verified(directory)
    except (UserError, RetryableError) as error:
        if is_listed and isinstance(directory, Address) and not (directory / MANIFEST).exists():
            print(f"{printable(directory)}: incomplete: an upload or deletion is running or was interrupted")
            return True
        print(
            f"{printable(directory)}: "
            f"{'UNREADABLE' if isinstance(error, RetryableError) else 'DAMAGED'}: {error}"
        )
        return False
    print(f"{printable(directory)}: intact")
    for name, value in _facts(source).items() if in_full else ():
        print(f"  {printable(name):13s} {printable(value)}")
    return True


def _facts(source: OpenCheckpoint) -> dict[str, str]:
    manifest, progress = source.manifest, source.facts["state"]["progress"]
    parameters = [shape for name, (shape, _) in source.shapes.items() if name.startswith("model.")]
    metrics = Evaluations.read(source.directory.parent.parent).of(manifest.state)
    not_saved = f"{first_five(source.left_out)} (in {source.initial_weights})" if source.left_out else "none"
    facts = {
        "step": f"{progress['step']:,} (epoch {progress['epoch']}, sample {progress['samples_in_epoch']:,})",
        "samples seen": f"{progress['samples_seen']:,}",
        "format": manifest.format,
        "strategy": f"{source.facts['strategy']} on {source.facts['world_size']} ranks",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at)),
        "torch": source.facts["torch_version"],
        "model": f"{sum(shape.numel() for shape in parameters):,} values in {len(parameters)} tensors",
        "not saved": not_saved,
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()) or "none",
        "size": f"{manifest.num_bytes / 1e6:,.2f} MB",
    }
    return facts | {f"  {name}": f"{file.bytes / 1e6:,.2f} MB" for name, file in manifest.files.items()}


if __name__ == "__main__":
    sys.exit(main())
