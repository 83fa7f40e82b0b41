"""Export the weights of a checkpoint in formats of other programs, without a GPU or a process group."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from trainer.checkpoint.manifest import fsync_directory, write_text
from trainer.checkpoint.open_checkpoint import ADAPTERS, MODEL_CONFIG, OpenCheckpoint, verified
from trainer.checkpoint.safetensors_files import NAMES, SINGLE, ToStore, write_file
from trainer.checkpoint.store import publish
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import printable
from trainer.files.writing import check_free

FORMATS = ("safetensors", "torch", "hf", "peft")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def convert(
    directory: Location, out: Path, to: str, averaged: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Write the model's weights from the checkpoint in `directory` to `out`, which is created atomically.

    Every format except `torch` needs memory for only one tensor at a time.

    Args:
        to: `safetensors` or `torch` for a file; `hf` for a folder that transformers' `from_pretrained` reads;
            `peft` for a folder of adapters that `peft.PeftModel.from_pretrained` reads.
        averaged: write the moving averages of the weights.
        dtype: the dtype of floating-point weights in `out`; None keeps their dtypes.

    Raises:
        UserError: if the checkpoint is damaged, its model can't be written in this format, or `out` exists or
            has no parent directory.
        OSError: if writing fails.
    """
    check_free(out)
    source = verified(directory)
    weights = source.weights(averaged, _adapters(source)["names"].values() if to == "peft" else None)
    stored = [
        ToStore(name, value, dtype if dtype is not None and value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    ]
    temporary_dir = Path(tempfile.mkdtemp(prefix=".tmp_", dir=out.parent))
    temporary = temporary_dir / out.name
    try:
        if to == "safetensors":
            _write_weights(temporary, stored)
        elif to == "torch":
            # For a mapped tensor, torch.save would write the whole mapped file.
            copies = {id(each.tensor): each.tensor.to(each.dtype, copy=True) for each in stored}
            with temporary.open("xb") as file:
                torch.save({each.key: copies[id(each.tensor)] for each in stored}, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            temporary.mkdir()
            (_write_peft if to == "peft" else _write_hf)(temporary, source, stored)
            fsync_directory(temporary)
        publish(temporary, out)
    finally:
        shutil.rmtree(temporary_dir, ignore_errors=True)


def _write_weights(path: Path, weights: Sequence[ToStore]) -> None:
    for each in weights:
        if each.dtype not in NAMES:
            raise UserError(f"{each.key} is {each.dtype}, which safetensors does not support; use --to torch")
    write_file(path, sorted(weights, key=lambda each: (-each.dtype.itemsize, each.key)))


def _write_hf(folder: Path, source: OpenCheckpoint, weights: Sequence[ToStore]) -> None:
    config: dict[str, Any] = source.facts.get(MODEL_CONFIG) or {}
    if "model_type" not in config:
        raise UserError(
            f"--to hf needs an unmodified transformers model, but {printable(source.directory)} contains a "
            "model that from_pretrained could not load; use --to peft for adapters, which you can merge "
            "into their base model with peft's merge_and_unload(), or --to safetensors for all weights"
        )
    if config.get("tie_word_embeddings"):  # from_pretrained ties them again, so one name is enough
        weights = list({id(each.tensor): each for each in reversed(weights)}.values())
    floating = {each.dtype for each in weights if each.tensor.is_floating_point()}
    if len(floating) == 1:
        config = {name: value for name, value in config.items() if name != "dtype"}
        config["torch_dtype"] = str(floating.pop()).removeprefix("torch.")
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    _write_weights(folder / SINGLE, weights)
    for name in _TOKENIZER:  # next to a dataset that a Hugging Face tokenizer encoded
        tokenizer_file = Path(str(source.config.get("data.dataset.path"))) / name
        if tokenizer_file.is_file():
            shutil.copyfile(tokenizer_file, folder / name)


def _adapters(source: OpenCheckpoint) -> dict[str, Any]:
    if (adapters := source.facts[ADAPTERS]) is None:
        raise UserError(
            f"--to peft: {printable(source.directory)} contains no PEFT adapters; its run did not set "
            "model.adapters"
        )
    return cast(dict[str, Any], adapters)


def _write_peft(folder: Path, source: OpenCheckpoint, weights: Sequence[ToStore]) -> None:
    adapters = _adapters(source)
    base = adapters["config"].get("base_model_name_or_path") or source.config.get("model.init_from")
    config = adapters["config"] | {"base_model_name_or_path": base}
    write_text(folder / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    by_name = {each.key: each for each in weights}
    named = [replace(by_name[own_name], key=peft_name) for peft_name, own_name in adapters["names"].items()]
    _write_weights(folder / "adapter_model.safetensors", named)
