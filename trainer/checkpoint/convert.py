"""The weights of a checkpoint in a form of other programs, with no GPU and no process group."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.hashing import fsync_directory, write_text
from trainer.checkpoint.open_checkpoint import HELD_BY, MODEL_CONFIG, OpenCheckpoint, verified
from trainer.checkpoint.safetensors_files import NAMES, SINGLE, ToStore, write_file
from trainer.checkpoint.store import appear
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.atomic_file import check_free

FORMS = ("safetensors", "torch", "hf")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def convert(
    directory: Location, out: Path, to: str, averaged: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Write the model's weights from the checkpoint in `directory` to `out`.

    `out` appears whole or not at all. `safetensors` and `torch` are files. `hf` is a folder for transformers'
    `from_pretrained`, with a config.json if the run's model had such a config. `safetensors` and `hf` need
    memory for one tensor.

    Args:
        averaged: use the moving averages of the weights.
        dtype: of the floating-point weights in `out`; None keeps theirs.

    Raises:
        UserError: the checkpoint does not verify, `out` exists, or its parent does not.
        OSError: of the disk.
    """
    check_free(out)
    source = verified(directory)
    weights = source.weights(averaged)
    beside = Path(tempfile.mkdtemp(prefix=".tmp_", dir=out.parent))  # shared with no other attempt
    temporary = beside / out.name
    try:
        if to == "safetensors":
            write_weights(temporary, weights, dtype)
        elif to == "torch":
            # Copies, each with memory of its own: of a mapped one, torch.save would write the whole file.
            once = {id(value): value.to(_dtype_of(value, dtype), copy=True) for value in weights.values()}
            with temporary.open("xb") as file:
                torch.save({name: once[id(value)] for name, value in weights.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            temporary.mkdir()
            _write_hf(temporary, source, weights, dtype)
            fsync_directory(temporary)
        appear(temporary, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_weights(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write a new safetensors file of `weights`; tied ones, which share their memory, are written twice.

    Raises:
        UserError: the format has no name for a dtype.
    """

    def to_store(name: str, value: Tensor) -> ToStore:
        kind = _dtype_of(value, dtype)
        if kind not in NAMES:
            raise UserError(f"{name} is {kind}, which safetensors has no name for; --to torch takes it")
        return ToStore(name, kind, tuple(value.shape), (one.to(kind) for one in [value]))  # when written

    ordered = sorted(weights.items(), key=lambda item: (-_dtype_of(item[1], dtype).itemsize, item[0]))
    write_file(path, [to_store(name, value) for name, value in ordered])


def _write_hf(
    folder: Path, source: OpenCheckpoint, weights: dict[str, Tensor], dtype: torch.dtype | None
) -> None:
    """Write config.json and the file of weights."""
    config: dict[str, Any] | None = source.facts.get(MODEL_CONFIG)
    if config is not None and HELD_BY in config:
        raise UserError(
            f"--to hf: {config[HELD_BY]} holds a model of transformers under other names than its own, as "
            "with adapters of PEFT, so from_pretrained would not find them. In Python, call save_pretrained "
            "of trainer.load_model(RUN), after merge_and_unload(); --to safetensors writes it as it is"
        )
    if config is not None:
        if config.get("tie_word_embeddings"):  # loading ties them again, so one name of each is enough
            first = {id(value): name for name, value in reversed(weights.items())}
            weights = {name: value for name, value in weights.items() if first[id(value)] == name}
        floating = {_dtype_of(value, dtype) for value in weights.values() if value.is_floating_point()}
        if len(floating) == 1:
            config = {name: value for name, value in config.items() if name != "dtype"}
            config["torch_dtype"] = str(floating.pop()).removeprefix("torch.")
        write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_weights(folder / SINGLE, weights, dtype)
    for name in _TOKENIZER:  # of tokens that were made by one of Hugging Face
        beside = Path(str(source.config.get("data.dataset.path"))) / name
        if beside.is_file():
            shutil.copyfile(beside, folder / name)


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which `tensor` is written: `dtype` if it is a floating-point one."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
