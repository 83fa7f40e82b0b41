"""Damaged checkpoints are refused on all ranks before a tensor is loaded, and weights run no code."""

import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint import manifest
from trainer.errors import UserError

Damage = Callable[[Path], str]


def _save(run_dir: Path) -> None:
    state = tiny.train_state()
    tiny.train(state, 2)
    tiny.checkpointer(run_dir, state=state).save(state)


def _refusals(checkpoint: Path, damages: list[Damage]) -> list[str | None]:
    """Return the error message for each damaged copy of ``checkpoint``; None if it was loaded."""
    state = tiny.train_state(seed=3)
    tiny.train(state, 1)
    before = tiny.everything(state)
    messages: list[str | None] = []
    for number, damage in enumerate(damages):
        copy = shutil.copytree(checkpoint, checkpoint.parent / f"copy_{number}")
        what = damage(copy)
        try:
            tiny.restore(tiny.checkpointer(checkpoint.parent.parent / "elsewhere"), state, str(copy))
            messages.append(None)
            print("loaded in spite of", what)
        except UserError as error:
            messages.append(str(error))
        tiny.assert_same(tiny.everything(state), before)
        shutil.rmtree(copy.resolve())
        copy.unlink(missing_ok=True)
    return messages


def flip_bit(seed: int, directory: Path) -> str:
    """Flip one bit of one file, with each bit of the checkpoint equally likely."""
    files = sorted(directory.iterdir())
    draw = random.Random(seed)
    path = draw.choices(files, [file.stat().st_size for file in files])[0]
    data = bytearray(path.read_bytes())
    position, bit = draw.randrange(len(data)), draw.randrange(8)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {position} of {path.name}"


def truncate(seed: int, directory: Path) -> str:
    draw = random.Random(seed)
    path = draw.choice(sorted(directory.iterdir()))
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def remove(pattern: str, directory: Path) -> str:
    path = next(directory.glob(pattern))
    path.unlink()
    return path.name


def flip_in_manifest(position: int, directory: Path) -> str:
    """Flip a bit of the manifest, for which no other file has a hash."""
    path = directory / manifest.MANIFEST
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)
    return f"byte {position} of the manifest"


def of_version_1(directory: Path) -> str:
    (directory / manifest.MANIFEST).write_text('{"format_version": 1, "files": {"tensors.pt": {}}}')
    return "version 1"


@pytest.mark.slow
def test_every_damage_is_found(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path)
    removed = ("manifest.json", "model-*", "state.json", "optim-*")
    damages: list[Damage] = [of_version_1, *(partial(remove, pattern) for pattern in removed)]
    damages += [partial(flip_bit, seed) for seed in range(50)] + [
        partial(truncate, seed) for seed in range(10)
    ]
    damages += [partial(flip_in_manifest, position) for position in range(0, 700, 25)]
    messages = run_ranks(_refusals, 1, tmp_path / "checkpoints" / "step_00000002", damages)[0]
    assert [index for index, message in enumerate(messages) if message is None] == []
    assert (
        "has format version 1, but this version of Ringmaster reads 4 to 5" in messages[0]
        and "\n" not in messages[0]
    )
    assert "no manifest.json" in messages[1]


class Payload:
    """Touches a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_weights_with_pickled_calls_run_no_code(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "would")))
    assert (tmp_path / "would").exists()
    torch.save({"first.weight": Payload(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"torch.load\(weights_only=True\) failed"):
        tiny.load_weights(tiny.Net(), tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
