"""Damaged and hostile checkpoints: each is refused before a tensor reaches the model, and none runs code."""

import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint import load_weights, store
from trainer.checkpoint.hashing import FileDigest
from trainer.errors import UserError

Damage = Callable[[Path], str]


def _save(run_dir: Path, format: str) -> None:
    state = tiny.train_state()
    tiny.train(state, 2)
    tiny.checkpointer(run_dir, format=format).save(state)


def _refusals(checkpoint: Path, damages: list[Damage]) -> list[str | None]:
    """The message with which each damaged copy of ``checkpoint`` is refused, None where it was loaded."""
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


class FlipBit:
    """One bit of one file, each bit of the checkpoint as likely as any other."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, directory: Path) -> str:
        files = sorted(directory.iterdir())
        draw = random.Random(self.seed)
        path = draw.choices(files, [file.stat().st_size for file in files])[0]
        data = bytearray(path.read_bytes())
        position, bit = draw.randrange(len(data)), draw.randrange(8)
        data[position] ^= 1 << bit
        path.write_bytes(data)
        return f"bit {bit} of byte {position} of {path.name}"


class Truncate:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, directory: Path) -> str:
        draw = random.Random(self.seed)
        path = draw.choice(sorted(directory.iterdir()))
        size = draw.randrange(path.stat().st_size)
        os.truncate(path, size)
        return f"{path.name} cut to {size} bytes"


class Remove:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __call__(self, directory: Path) -> str:
        path = next(directory.glob(self.pattern))
        path.unlink()
        return path.name


class Empty(Remove):
    def __call__(self, directory: Path) -> str:
        path = next(directory.glob(self.pattern))
        path.write_bytes(b"")
        return path.name


TENSOR_FILE = {"full": "tensors.pt", "sharded": "__0_0.distcp"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["full", "sharded"])
def test_every_damage_is_found(tmp_path: Path, format: str) -> None:
    run_ranks(_save, 1, tmp_path, format)
    tensors = TENSOR_FILE[format]
    damages: list[Damage] = [FlipBit(seed) for seed in range(100)] + [Truncate(seed) for seed in range(20)]
    damages += [
        Empty(tensors),
        Remove(tensors),
        Remove("manifest.json"),
        Remove("state.json"),
        Remove("rng.pt"),
    ]
    messages = run_ranks(_refusals, 1, tmp_path / "checkpoints" / "step_00000002", damages)[0]
    assert [index for index, message in enumerate(messages) if message is None] == []
    assert tensors in messages[120] and "0 bytes" in messages[120]
    assert "no manifest.json" in messages[122]


class FlipManifest:
    """One bit of the manifest, which no other file vouches for."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, directory: Path) -> str:
        path = directory / store.MANIFEST
        data = bytearray(path.read_bytes())
        data[self.position % len(data)] ^= 1
        path.write_bytes(data)
        return f"byte {self.position} of the manifest"


@pytest.mark.slow
def test_the_manifest_vouches_for_itself(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path, "full")
    directory = tmp_path / "checkpoints" / "step_00000002"
    damages: list[Damage] = [FlipManifest(position) for position in range(0, 700, 5)]
    assert None not in run_ranks(_refusals, 1, directory, damages)[0]


# ---- what a stranger may have put there. A stranger can write manifests too.


class Payload:
    """Touches a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _sign(directory: Path, rename: dict[str, str] | None = None) -> None:
    """Make the manifest agree with the files again."""
    old = json.loads((directory / store.MANIFEST).read_text())
    files = {}
    for name in old["files"]:
        data = (directory / name).read_bytes()
        files[(rename or {}).get(name, name)] = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    manifest = store.Manifest(old["format"], old["step"], old["saved_at"], files)
    (directory / store.MANIFEST).write_text(store.manifest_text(manifest))


class Hostile:
    """Replaces one part of a checkpoint by one that would run code, or reach outside."""

    def __init__(self, kind: str, proof: Path) -> None:
        self.kind, self.proof = kind, proof

    def __call__(self, directory: Path) -> str:
        payload = Payload(self.proof)
        match self.kind:
            case "full file":
                torch.save({"model.first.weight": payload}, directory / "tensors.pt")
                _sign(directory)
            case "metadata":
                (directory / ".metadata").write_bytes(pickle.dumps(payload))
                _sign(directory)
            case "within metadata":
                (directory / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=payload)))
                _sign(directory)
            case "shard":
                _put_into_shard(directory, payload)
                _sign(directory)
            case "manifest":
                shutil.copy(directory / "tensors.pt", self.proof.with_suffix(".pt"))
                _sign(directory, {"tensors.pt": f"../../{self.proof.with_suffix('.pt').name}"})
            case "link":
                (directory / "tensors.pt").rename(self.proof.with_suffix(".pt"))
                (directory / "tensors.pt").symlink_to(self.proof.with_suffix(".pt"))
                _sign(directory)
            case "metadata path":
                metadata = pickle.loads((directory / ".metadata").read_bytes())
                for info in metadata.storage_data.values():
                    info.relative_path = f"../{directory.name}/{info.relative_path}"
                (directory / ".metadata").write_bytes(pickle.dumps(metadata))
                _sign(directory)
            case "no chunks":
                metadata = pickle.loads((directory / ".metadata").read_bytes())
                metadata.state_dict_metadata["model.first.weight"].chunks.clear()
                (directory / ".metadata").write_bytes(pickle.dumps(metadata))
                _sign(directory)
            case "no files":
                manifest = dataclasses.replace(store.read_manifest(directory), files={})
                (directory / store.MANIFEST).write_text(store.manifest_text(manifest))
            case "a tensor less":
                tensors = torch.load(directory / "tensors.pt", weights_only=True)
                del tensors["model.first.weight"]
                torch.save(tensors, directory / "tensors.pt")
                _sign(directory)
            case "another step":
                manifest = dataclasses.replace(store.read_manifest(directory), step=3)
                (directory / store.MANIFEST).write_text(store.manifest_text(manifest))
            case "another name":
                directory.rename(directory.with_name("step_00000003"))
                directory.symlink_to("step_00000003")
        return self.kind


def _put_into_shard(directory: Path, payload: Payload) -> None:
    """One tensor's bytes in the shard become a pickle of ``payload``; the metadata points there."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    shard = directory / "__0_0.distcp"
    begin = shard.stat().st_size
    with shard.open("ab") as file:
        torch.save(payload, file)
    for info in metadata.storage_data.values():
        info.offset, info.length = begin, shard.stat().st_size - begin
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


HOSTILE = [
    ("full", "full file", "no file of plain tensors"),
    ("sharded", "metadata", "asks for posix.mkdir"),
    ("sharded", "within metadata", "asks for posix.mkdir"),
    ("sharded", "shard", "posix.mkdir"),
    ("full", "manifest", "only plain file names beside it"),
    ("full", "link", "tensors.pt is no plain file"),
    ("sharded", "no chunks", "some part of model.first.weight is in none of its chunks"),
    ("sharded", "no files", "is not whole: its manifest lacks .metadata, rng.pt, state.json"),
    ("full", "no files", "is not whole: its manifest lacks rng.pt, state.json, tensors.pt"),
    ("full", "a tensor less", "names tensors that are not there: model.first.weight"),
    ("full", "another step", "its state is of step 2, its manifest of step 3"),
    ("full", "another name", "its name must be step_00000002"),
    ("sharded", "metadata path", "only those of the manifest are allowed"),
]


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_hostile_checkpoints_run_nothing(tmp_path: Path, format: str) -> None:
    run_ranks(_save, 1, tmp_path, format)
    directory = tmp_path / "checkpoints" / "step_00000002"
    cases = [(kind, message) for its_format, kind, message in HOSTILE if its_format == format]
    proof = tmp_path / "ran"
    damages: list[Damage] = [Hostile(kind, proof) for kind, _ in cases]
    messages = run_ranks(_refusals, 1, directory, damages)[0]
    for (kind, expected), message in zip(cases, messages, strict=True):
        assert message is not None and expected in message, f"{kind}: {message}"
    assert not proof.exists()


def test_the_payload_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_hostile_weights_run_nothing(tmp_path: Path) -> None:
    torch.save({"first.weight": Payload(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(UserError, match="no file of plain tensors"):
        load_weights(tiny.Net(), tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
