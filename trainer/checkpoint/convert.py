"""The weights of a checkpoint in a form of other programs, with no GPU and no process group."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.safetensors_files import NAMES, ToStore, write_file
from trainer.checkpoint.source import whole
from trainer.checkpoint.store import appear
from trainer.errors import UserError

FORMS = ("safetensors", "torch")


def convert(directory: Path, out: Path, to: str, averaged: bool = False) -> None:
    """Write the model's weights, which the checkpoint in ``directory`` holds, to the new file ``out``.

    It appears whole or not at all. ``safetensors`` takes memory for one tensor, whatever the source.
    `averaged`: their moving averages.

    Raises:
        UserError: ``directory`` does not verify, ``out`` exists, or its parent does not.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory")
    if to not in FORMS:
        raise UserError(f"--to {to} is not one of {', '.join(FORMS)}")
    weights = whole(directory).weights(averaged)
    temporary = out.with_name(f".tmp_{out.name}")
    try:
        if to == "safetensors":
            write_weights(temporary, weights)
        else:
            # Tied ones stay one; a view of a mapped file would be saved with all of it.
            copies = {id(tensor): tensor.clone() for tensor in weights.values()}
            with temporary.open("xb") as file:
                torch.save({name: copies[id(tensor)] for name, tensor in weights.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        appear(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """A safetensors file of ``weights``; tied ones, which share their memory, are written twice."""
    for name, value in weights.items():
        if value.dtype not in NAMES:
            raise UserError(
                f"{name} is {value.dtype}, which safetensors has no name for; --to torch takes it"
            )
    ordered = sorted(weights.items(), key=lambda item: (-item[1].itemsize, item[0]))
    write_file(path, [ToStore(name, value.dtype, tuple(value.shape), [value]) for name, value in ordered])
