"""The weights of a checkpoint in a form of other programs, with no GPU and no process group."""

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
from trainer.checkpoint.store import appear
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import printable
from trainer.files.writing import check_free

FORMS = ("safetensors", "torch", "hf", "peft")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def convert(
    directory: Location, out: Path, to: str, averaged: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Write the model's weights from the checkpoint in `directory` to `out`.

    `out` appears whole or not at all. `safetensors` and `torch` are files. `hf` is a folder for transformers'
    `from_pretrained`. `peft` is one for that of `peft.PeftModel`: the adapters without the model. All but
    `torch` need memory for one tensor.

    Args:
        averaged: use the moving averages of the weights.
        dtype: of the floating-point weights in `out`; None keeps theirs.

    Raises:
        UserError: the checkpoint does not verify, or has no model of that form; `out` exists, or its parent
            does not.
        OSError: of the disk.
    """
    check_free(out)
    source = verified(directory)
    weights = source.weights(averaged, _adapters(source)["names"].values() if to == "peft" else None)
    stored = [
        ToStore(name, value, dtype if dtype is not None and value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    ]
    beside = Path(tempfile.mkdtemp(prefix=".tmp_", dir=out.parent))  # shared with no other attempt
    temporary = beside / out.name
    try:
        if to == "safetensors":
            _write_weights(temporary, stored)
        elif to == "torch":
            # Copies, each with memory of its own: of a mapped one, torch.save would write the whole file.
            once = {id(each.tensor): each.tensor.to(each.dtype, copy=True) for each in stored}
            with temporary.open("xb") as file:
                torch.save({each.key: once[id(each.tensor)] for each in stored}, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            temporary.mkdir()
            (_write_peft if to == "peft" else _write_hf)(temporary, source, stored)
            fsync_directory(temporary)
        appear(temporary, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(path: Path, weights: Sequence[ToStore]) -> None:
    """Write a new safetensors file of `weights`; tied ones, which share their memory, are written twice.

    Raises:
        UserError: the format has no name for a dtype.
    """
    for each in weights:
        if each.dtype not in NAMES:
            words = "which safetensors has no name for; --to torch takes it"
            raise UserError(f"{each.key} is {each.dtype}, {words}")
    write_file(path, sorted(weights, key=lambda each: (-each.dtype.itemsize, each.key)))


def _write_hf(folder: Path, source: OpenCheckpoint, weights: Sequence[ToStore]) -> None:
    """Write config.json and the file of weights."""
    config: dict[str, Any] = source.facts.get(MODEL_CONFIG) or {}
    if "model_type" not in config:
        raise UserError(
            f"--to hf: {printable(source.directory)} is not of a model of transformers as it is, so "
            "from_pretrained could not open it; --to peft writes adapters, which peft merges into their "
            "base (merge_and_unload()), and --to safetensors all weights under the names that they have"
        )
    if config.get("tie_word_embeddings"):  # loading ties them again, so one name of each is enough
        weights = list({id(each.tensor): each for each in reversed(weights)}.values())
    floating = {each.dtype for each in weights if each.tensor.is_floating_point()}
    if len(floating) == 1:
        config = {name: value for name, value in config.items() if name != "dtype"}
        config["torch_dtype"] = str(floating.pop()).removeprefix("torch.")
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    _write_weights(folder / SINGLE, weights)
    for name in _TOKENIZER:  # of tokens that were made by one of Hugging Face
        beside = Path(str(source.config.get("data.dataset.path"))) / name
        if beside.is_file():
            shutil.copyfile(beside, folder / name)


def _adapters(source: OpenCheckpoint) -> dict[str, Any]:
    if (found := source.facts[ADAPTERS]) is None:
        raise UserError(
            f"--to peft: {printable(source.directory)} holds no adapters of peft, which model.adapters sets"
        )
    return cast(dict[str, Any], found)


def _write_peft(folder: Path, source: OpenCheckpoint, weights: Sequence[ToStore]) -> None:
    """Write adapter_config.json, which names the base by `model.init_from`, and the file of adapters."""
    adapters = _adapters(source)
    base = adapters["config"].get("base_model_name_or_path") or source.config.get("model.init_from")
    config = adapters["config"] | {"base_model_name_or_path": base}
    write_text(folder / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    by_name = {each.key: each for each in weights}
    named = [replace(by_name[ours], key=theirs) for theirs, ours in adapters["names"].items()]
    _write_weights(folder / "adapter_model.safetensors", named)
