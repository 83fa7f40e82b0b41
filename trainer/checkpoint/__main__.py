"""Look at checkpoints, verify and convert them: ``python -m trainer.checkpoint show|verify|convert``.

Needs no GPU and no process group, and runs no code from a checkpoint.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.convert import FORMS, convert
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, verified
from trainer.distributed.backend_flags import DTYPES
from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import first_five, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 if a checkpoint is damaged or a request cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in (
        ("show", "what a checkpoint, or each checkpoint of a run, holds, and whether it is intact"),
        ("verify", "compare every file with its sha256; the exit status says whether all are intact"),
        ("convert", "write the weights of a checkpoint in a form of other programs"),
    ):
        command = commands.add_parser(name, help=help)
        words = "a checkpoint, or, but for convert, a run; its path, or an address as s3://..."
        command.add_argument("directory", type=location, help=words)
        if name == "convert":
            command.add_argument("out", type=Path, help="what to write; must not exist")
            command.add_argument("--to", required=True, choices=FORMS)
            command.add_argument("--ema", action="store_true", help="the weights' moving averages")
            command.add_argument("--dtype", choices=DTYPES, help="of the weights; without it, their own")
    chosen = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # an ASCII terminal's
    try:
        if chosen.command == "convert":
            convert(chosen.directory, chosen.out, chosen.to, chosen.ema, DTYPES.get(chosen.dtype))
            print(f"{printable(chosen.out)} written")
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
    """`directory` itself, or the checkpoints in it if it is a run or its folder `checkpoints`."""
    if (directory / MANIFEST).exists() or not directory.is_dir():
        yield directory
        return
    inner = directory / "checkpoints"
    listing: Listing[Any] = Listing(inner if inner.is_dir() else directory)
    found = listing.directories()
    if not found:
        raise UserError(f"{printable(directory)} is not a checkpoint (it has no {MANIFEST}) and holds none")
    yield from found


def _report(directory: Location, in_full: bool, is_listed: bool) -> bool:
    """Print a report of one checkpoint; return whether it is intact, or may be on its way to an address."""
    try:
        source = verified(directory)
    except (UserError, RetryableError) as error:
        if is_listed and isinstance(directory, Address) and not (directory / MANIFEST).exists():
            print(f"{printable(directory)}: incomplete: it is being copied or deleted, or that was cut off")
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
    left_out = f"{first_five(source.left_out)}, of {source.initial_weights}" if source.left_out else "none"
    facts = {
        "step": f"{progress['step']:,} (epoch {progress['epoch']}, sample {progress['samples_in_epoch']:,})",
        "samples seen": f"{progress['samples_seen']:,}",
        "format": manifest.format,
        "strategy": f"{source.facts['strategy']} on {source.facts['world_size']} ranks",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at)),
        "torch": source.facts["torch_version"],
        "model": f"{sum(shape.numel() for shape in parameters):,} numbers in {len(parameters)} tensors",
        "left out": left_out,
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()) or "none",
        "size": f"{manifest.num_bytes / 1e6:,.2f} MB",
    }
    return facts | {f"  {name}": f"{file.bytes / 1e6:,.2f} MB" for name, file in manifest.files.items()}


if __name__ == "__main__":
    sys.exit(main())
