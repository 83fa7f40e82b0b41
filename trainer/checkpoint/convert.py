"""The weights of a checkpoint in a form of other programs, with no GPU and no process group."""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainer.checkpoint.hashing import fsync_directory, write_text
from trainer.checkpoint.open_checkpoint import HELD_BY, MODEL_CONFIG, OpenCheckpoint, verified
from trainer.checkpoint.safetensors_files import INDEX, NAMES, SINGLE, ToStore, write_file
from trainer.checkpoint.store import appear
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import reason

FORMS = ("safetensors", "torch", "hf", "dcp")
FILE_BYTES = 5 * 10**9  # as Hugging Face splits


def convert(
    directory: Location,
    out: Path,
    to: str,
    averaged: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model's weights from the checkpoint in `directory` to `out`.

    `out` appears whole or not at all. `safetensors` and `torch` are files. `hf` is a folder for transformers'
    `from_pretrained`, with a config.json if the run's model had such a config. `dcp` is a folder for
    `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=out)`. `safetensors` and `hf` need
    memory for one tensor.

    Args:
        averaged: use the moving averages of the weights.
        dtype: of the floating-point weights in `out`; None keeps theirs.
        file_bytes: `hf` begins another file before a tensor that makes one larger than this.

    Raises:
        UserError: the checkpoint does not verify, `out` exists, or its parent does not.
        OSError: of the disk.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a directory")
    source = verified(directory)
    weights = source.weights(averaged)
    beside = Path(tempfile.mkdtemp(prefix=".tmp_", dir=out.parent))  # shared with no other attempt
    temporary = beside / out.name
    try:
        match to:
            case "safetensors":
                write_weights(temporary, weights, dtype)
            case "torch":
                with temporary.open("xb") as file:
                    torch.save(_converted(weights, dtype, copy=True), file)
                    file.flush()
                    os.fsync(file.fileno())
            case "dcp":
                _write_dcp(temporary, _converted(weights, dtype))
                fsync_directory(temporary)
            case "hf":
                temporary.mkdir()
                _write_hf(temporary, source, weights, dtype, file_bytes)
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
        chunks = (_to(tensor, dtype) for tensor in (value,))  # converted when it is written
        return ToStore(name, _dtype_of(value, dtype), tuple(value.shape), chunks)

    for name, value in weights.items():
        if _dtype_of(value, dtype) not in NAMES:
            raise UserError(
                f"{name} is {value.dtype}, which safetensors has no name for; --to torch takes it"
            )
    ordered = sorted(weights.items(), key=lambda item: (-_dtype_of(item[1], dtype).itemsize, item[0]))
    write_file(path, [to_store(name, value) for name, value in ordered])


def _write_dcp(folder: Path, weights: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a process group, which no_dist says
        try:
            dcp.save(weights, checkpoint_id=folder, no_dist=True)
        except dcp.CheckpointException as error:  # not an Exception
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"{folder.name} cannot be written: {reason(cause)}") from error


def _write_hf(
    folder: Path,
    source: OpenCheckpoint,
    weights: dict[str, Tensor],
    dtype: torch.dtype | None,
    file_bytes: int,
) -> None:
    """Write config.json, the files of weights, and the index of these if there are several."""
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
    parts = list(_split(weights, dtype, file_bytes))
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        size = sum(_num_bytes(value, dtype) for value in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    for name, part in zip(names, parts, strict=True):
        write_weights(folder / name, part, dtype)


def _split(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, file_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """The weights of each file, in order; a file has more than `file_bytes` only for a single tensor."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in weights.items():
        more = _num_bytes(value, dtype)
        if part and size + more > file_bytes:
            yield part
            part, size = {}, 0
        part[name], size = value, size + more
    yield part


def _converted(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, copy: bool = False
) -> dict[str, Tensor]:
    """`weights` in `dtype`; tied ones stay tied.

    Args:
        copy: give each its own memory: of a mapped one, torch.save would write the whole file.
    """
    once = {id(tensor): _to(tensor, dtype, copy) for tensor in weights.values()}
    return {name: once[id(tensor)] for name, tensor in weights.items()}


def _to(tensor: Tensor, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    return tensor.to(_dtype_of(tensor, dtype), copy=copy)


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which `tensor` is written: `dtype` if it is a floating-point one."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _num_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * _dtype_of(tensor, dtype).itemsize
