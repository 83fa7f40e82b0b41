"""One checkpoint in another form, with no GPU and no process group."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from trainer.checkpoint import full, sharded
from trainer.checkpoint.hashing import HashingFile
from trainer.checkpoint.safetensors_files import write_safetensors
from trainer.checkpoint.source import RNG, STATE, Source, whole
from trainer.checkpoint.store import appear, open_listed, seal
from trainer.errors import UserError

FORMS = ("full", "sharded", "safetensors", "torch")
PORTION_BYTES = 1 << 28


def convert(directory: Path, out: Path, to: str, averaged: bool = False) -> None:
    """Write the checkpoint in ``directory`` to ``out``, which must not exist; it appears whole or not at all.

    ``full`` and ``sharded`` are directories to resume from; ``sharded`` needs memory for 256 MB or for the
    largest tensor, whatever the source. ``safetensors`` and ``torch`` are files of the model's weights alone,
    to start from or for other programs; `averaged`: of their moving averages.

    Raises:
        UserError: ``directory`` does not verify, ``out`` exists, or its parent does not.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory")
    if averaged and to in ("full", "sharded"):
        raise UserError(f"--ema writes weights alone, but --to {to} a whole checkpoint, which has both")
    source = whole(directory)
    temporary = out.with_name(f".tmp_{out.name}")
    try:
        match to:
            case "full" | "sharded":
                _write_checkpoint(source, temporary, out, to)
            case "safetensors":
                write_safetensors(temporary, source.weights(averaged))
                _appear(temporary, out)
            case "torch":
                torch.save(source.weights(averaged), temporary)
                _appear(temporary, out)
            case _:
                raise UserError(f"--to {to} is not one of {', '.join(FORMS)}")
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def _write_checkpoint(source: Source, temporary: Path, out: Path, to: str) -> None:
    temporary.mkdir()
    digests = {}
    if to == "full":
        digests[full.TENSORS] = full.write(temporary / full.TENSORS, source.read())
    else:
        digests |= sharded.write_streaming(
            temporary, source.shapes, lambda tensors: source.read_into(tensors, None), PORTION_BYTES
        )
    for name in (STATE, RNG):
        with (
            open_listed(source.directory, source.manifest, name) as theirs,
            HashingFile(temporary / name) as ours,
        ):
            for block in theirs.blocks(1 << 20):
                ours.write(block)
        digests[name] = ours.digest
    seal(temporary, replace(source.manifest, format=to, files=digests))
    appear(temporary, out)


def _appear(temporary: Path, out: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    appear(temporary, out)
