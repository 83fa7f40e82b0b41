"""Hostile checkpoints by the dozen: real ones, changed at the level of files, JSON, pickle opcodes and zip.

Each ``kind`` is a function that changes a copy of a whole checkpoint of two steps. The manifest is signed anew
afterwards (a stranger can do that), unless the kind is about the manifest.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import socket
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from trainer.checkpoint.store import MANIFEST

STEP = "step_00000002"
WEIGHT = "model.first.weight"
ESCAPE = "x\x1b[2K\nforged: whole\u202e"
GLOBAL_MKDIR = b"cposix\nmkdir\n"

Change = Callable[[Path], Any]
KINDS: dict[str, tuple[str, Change]] = {}  # name: (format it applies to, what to do)
MISFITS: dict[str, Change] = {}  # whole, but of no use to this run: not passed over
FILES: dict[str, Change] = {}  # for model.init_from


def _kind(name: str, change: Change, format: str = "full") -> None:
    assert name not in KINDS, name
    KINDS[name] = (format, change)


# ---- the tools


def sign(directory: Path, **changes: Any) -> None:
    """Make the manifest agree with the files, whatever they are, and with ``changes`` (of raw JSON)."""
    raw = json.loads((directory / MANIFEST).read_text())
    for name in raw["files"]:
        path = directory / name
        if path.exists() and stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size < 1 << 30:
            data = path.read_bytes()
            raw["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        elif path.exists():
            raw["files"][name]["bytes"] = path.lstat().st_size
    write_manifest(directory, {**raw, **changes})


def write_manifest(directory: Path, raw: dict[str, Any]) -> None:
    content = {key: value for key, value in raw.items() if key != "sha256"}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")


def manifest(**changes: Any) -> Change:
    return lambda directory: sign(directory, **changes)


def manifest_bytes(data: bytes) -> Change:
    return lambda directory: (directory / MANIFEST).write_bytes(data)


def in_manifest(edit: Callable[[str], str]) -> Change:
    def change(directory: Path) -> None:
        path = directory / MANIFEST
        path.write_text(edit(path.read_text()))

    return change


def listed(**digest: Any) -> Change:
    """What the manifest says of rng.pt."""

    def change(directory: Path) -> None:
        raw = json.loads((directory / MANIFEST).read_text())
        raw["files"]["rng.pt"] |= digest
        write_manifest(directory, raw)

    return change


def also_listed(name: str) -> Change:
    def change(directory: Path) -> None:
        raw = json.loads((directory / MANIFEST).read_text())
        raw["files"][name] = raw["files"]["rng.pt"]
        write_manifest(directory, raw)

    return change


def state(*path: str, to: Any = None, drop: bool = False) -> Change:
    """state.json with the value at ``path`` replaced or dropped."""

    def change(directory: Path) -> None:
        facts = json.loads((directory / "state.json").read_text())
        node = facts
        for key in path[:-1]:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if drop:
            del node[path[-1]]
        else:
            node[path[-1]] = to
        (directory / "state.json").write_text(json.dumps(facts))
        sign(directory)

    return change


def file_bytes(name: str, data: bytes) -> Change:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(data)
        sign(directory)

    return change


def in_place(name: str, make: Callable[[Path], None]) -> Change:
    def change(directory: Path) -> None:
        (directory / name).rename(directory.parent.parent / "moved")
        make(directory / name)
        with contextlib.suppress(ValueError):
            sign(directory) if name != MANIFEST else None

    return change


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may have 108 characters
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _sparse(size: int, begin: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, size)

    return make


def tensors(edit: Callable[[dict[str, Any]], Any], name: str = "tensors.pt") -> Change:
    """The tensor file with another content, written by torch.save."""

    def change(directory: Path) -> None:
        content = torch.load(directory / name, weights_only=True)
        changed = edit(content)
        torch.save(content if changed is None else changed, directory / name)
        sign(directory)

    return change


def put(**values: Any) -> Change:
    return tensors(lambda content: content.update(values) or {**content, WEIGHT: values["weight"]})


def zipped(
    edit: Callable[[list[tuple[str, bytes]]], Any], name: str = "tensors.pt", **options: Any
) -> Change:
    """The records of the tensor file edited, and packed again by another program."""

    def change(directory: Path) -> None:
        torch.save(torch.load(directory / name, weights_only=True), directory / name)  # with its checksums
        with zipfile.ZipFile(directory / name) as archive:
            records = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        edit(records)
        with zipfile.ZipFile(directory / name, "w", **options) as archive:
            for record, data in records:
                archive.writestr(record, data)
        sign(directory)

    return change


def pickled(data: bytes | Callable[[bytes], bytes], name: str = "tensors.pt") -> Change:
    """The tensor file with other bytes for its data.pkl."""

    def edit(records: list[tuple[str, bytes]]) -> None:
        for index, (record, old) in enumerate(records):
            if record.endswith("data.pkl"):
                records[index] = (record, data(old) if callable(data) else data)

    return zipped(edit, name)


def raw(edit: Callable[[bytes], bytes], name: str = "tensors.pt") -> Change:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(edit((directory / name).read_bytes()))
        sign(directory)

    return change


def end_record(offset: int, code: str, value: int) -> Change:
    """One field of the end of the central directory of the tensor file."""

    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(code, changed, len(data) - 22 + offset, value)
        return bytes(changed)

    return raw(edit)


def metadata(edit: Callable[[Any], Any]) -> Change:
    def change(directory: Path) -> None:
        content = pickle.loads((directory / ".metadata").read_bytes())
        changed = edit(content)
        (directory / ".metadata").write_bytes(pickle.dumps(content if changed is None else changed))
        sign(directory)

    return change


def of_weight(**changes: Any) -> Change:
    """What the metadata says of the tensor WEIGHT."""
    return metadata(lambda m: vars(m.state_dict_metadata[WEIGHT]).update(changes))


def chunks(*boxes: tuple[list[Any], list[Any]]) -> Change:
    """WEIGHT (7 x 5) in other chunks, each with a place of its own in the shard."""

    def edit(m: Any) -> None:
        place = m.storage_data.pop(MetadataIndex(WEIGHT, torch.Size([0, 0])))
        m.state_dict_metadata[WEIGHT].chunks = [
            ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in boxes
        ]
        for begin, _ in boxes:
            m.storage_data[MetadataIndex(WEIGHT, torch.Size(begin))] = place

    return metadata(edit)


def place(**changes: Any) -> Change:
    """Where the metadata says that WEIGHT lies."""
    return metadata(lambda m: vars(m.storage_data[MetadataIndex(WEIGHT, torch.Size([0, 0]))]).update(changes))


def item(content: Any, edit: Callable[[bytes], bytes] = lambda data: data) -> Change:
    """WEIGHT's chunk in the shard is what torch.save makes of ``content``."""

    def change(directory: Path) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data, shard = edit(buffer.getvalue()), directory / "__0_0.distcp"
        begin = shard.stat().st_size
        with shard.open("ab") as file:
            file.write(data)
        place(offset=begin, length=len(data))(directory)

    return change


def deflate(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return buffer.getvalue()


class Bomb:
    """Pickles as ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


NESTED = (
    b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."
)  # a tuple in a tuple in ... as a key: it is hashed
DICTS = b"\x80\x02(" + b"}" * 600_000 + b"l."
FAR_MEMO = b"\x80\x02Nr" + struct.pack("<I", 600_000_000) + b"."


# ---- files

for _name in (MANIFEST, "state.json", "rng.pt", "tensors.pt"):
    _kind(f"{_name}: a FIFO", in_place(_name, os.mkfifo))
    _kind(f"{_name}: a link to /dev/zero", in_place(_name, lambda path: path.symlink_to("/dev/zero")))
    _kind(f"{_name}: a directory", in_place(_name, lambda path: path.mkdir()))
    _kind(f"{_name}: a socket", in_place(_name, _socket))
    _kind(f"{_name}: a link to itself", in_place(_name, lambda path: path.symlink_to(path.name)))
    _kind(f"{_name}: a link to the right file", in_place(_name, lambda path: path.symlink_to("../../moved")))
    _kind(f"{_name}: 4 TB of nothing", in_place(_name, _sparse(1 << 42)))
    _kind(f"{_name}: empty", raw(lambda data: b"", _name) if _name != MANIFEST else manifest_bytes(b""))
for _name in (".metadata", "__0_0.distcp"):
    _kind(f"{_name}: a FIFO", in_place(_name, os.mkfifo), "sharded")
    _kind(
        f"{_name}: a link to /dev/zero", in_place(_name, lambda path: path.symlink_to("/dev/zero")), "sharded"
    )
    _kind(f"{_name}: 4 TB of nothing", in_place(_name, _sparse(1 << 42)), "sharded")
    _kind(f"{_name}: empty", raw(lambda data: b"", _name), "sharded")
if os.geteuid() == 0:
    _kind(
        "state.json: a device",
        in_place("state.json", lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))),
    )
_kind(
    "tensors.pt: begins as an archive, then 4 TB of nothing",
    in_place("tensors.pt", _sparse(1 << 42, b"PK\3\4")),
)
_kind("state.json: 100 MB of nothing", in_place("state.json", _sparse(100 << 20)))

# ---- JSON

for _value in (math.inf, math.nan, "2", True, -2, 2**80, [2], None, 2.0):
    _kind(f"manifest: step {_value!r}", manifest(step=_value))
for _value in (math.inf, math.nan, -1.0, 1e300, "now", None):
    _kind(f"manifest: saved_at {_value!r}", manifest(saved_at=_value))
for _value in ({}, [], None, "all", {"rng.pt": 5}, {"rng.pt": {}}):
    _kind(
        f"manifest: files {_value!r}",
        lambda directory, value=_value: (sign(directory), sign_files(directory, value)),
    )


def sign_files(directory: Path, value: Any) -> None:
    raw = json.loads((directory / MANIFEST).read_text())
    write_manifest(directory, {**raw, "files": value})


for _value in (-1, math.inf, "many", 2**70, 1.5):
    _kind(f"manifest: a file of {_value!r} bytes", listed(bytes=_value))
_kind("manifest: a sha256 that is a number", listed(sha256=7))
for _value in ("../state.json", "a/b", "", "..", "nul\0", ESCAPE, "n" * 100_000, "\ud800", MANIFEST):
    _kind(f"manifest: also the file {_value[:20]!r}", also_listed(_value))
for _value in (ESCAPE, "", None, "\ud800", ["full"]):
    _kind(f"manifest: format {_value!r}", manifest(format=_value))
for _value in ([], {"eval/loss": "low"}, {"eval/loss": None}, None):
    _kind(f"manifest: metrics {_value!r}", manifest(metrics=_value))
for _value in (99, math.inf, "1"):
    _kind(f"manifest: format_version {_value!r}", manifest(format_version=_value))
for _value in ("../../up", ESCAPE, 5, "", "i" * 100):
    _kind(f"manifest: run_id {str(_value)[:20]!r}", manifest(run_id=_value))
_kind("manifest: a key twice", in_manifest(lambda text: text.replace("{", '{"step": 2,', 1)))
_kind(
    "manifest: UTF-16",
    lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_text().encode("utf-16")),
)
_kind("manifest: no UTF-8", manifest_bytes(b'{"step": "\xff\xfe"}'))
_kind("manifest: 100,000 brackets", manifest_bytes(b"[" * 100_000))
_kind("manifest: 100,000 braces", manifest_bytes(b'{"a":' * 100_000))
_kind("manifest: 900 brackets, closed", manifest_bytes(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"))
_kind("manifest: an int of a million digits", manifest_bytes(b'{"step": ' + b"9" * 1_000_000 + b"}"))
_kind("manifest: 30 MB of lists", manifest_bytes(b'{"a":[' + b"[]," * 10_000_000 + b"0]}"))
_kind("manifest: a list", manifest_bytes(b"[]"))
_kind("manifest: a text with escapes", manifest_bytes(json.dumps({ESCAPE: ESCAPE}).encode()))
_kind("manifest: something after it", in_manifest(lambda text: text + "{}"))
_kind("manifest: no sha256 of its own", in_manifest(lambda text: text.replace('"sha256"', '"sha257"')))

_kind("state.json: no JSON", file_bytes("state.json", b"hello"))
_kind("state.json: 100,000 brackets", file_bytes("state.json", b'{"state":' + b"[" * 100_000))
_kind("state.json: no UTF-8", file_bytes("state.json", b'{"state": "\xc3\x28"}'))
for _name in ("strategy", "world_size", "torch_version", "config", "state", "rng"):
    _kind(f"state.json: no {_name}", state(_name, drop=True))
    _kind(f"state.json: {_name} of another type", state(_name, to=[1]))
for _value in (0, -1, 10**9, 1e9, "1"):
    _kind(f"state.json: world_size {_value!r}", state("world_size", to=_value))
for _name in ("model", "optimizer", "schedule", "scaler", "progress"):
    _kind(f"state: no {_name}", state("state", _name, drop=True))
    _kind(f"state: {_name} a text", state("state", _name, to="gone"))
for _value in ("2", math.nan, math.inf, -1, 2.5, 10**30, None, True, 3):
    _kind(f"progress: step {_value!r}", state("state", "progress", "step", to=_value))
for _value in ("0", math.inf, -1):
    _kind(f"progress: epoch {_value!r}", state("state", "progress", "epoch", to=_value))
_kind("progress: no position in the epoch", state("state", "progress", "samples_in_epoch", drop=True))
_kind("state.json: num_samples with escapes", state("num_samples", to=ESCAPE))
_kind("progress: no samples_seen", state("state", "progress", "samples_seen", drop=True))
for _value in (5, "model.none", "model.second.weight", ["a"], {"$tensor": WEIGHT}, None, ESCAPE):
    _kind(f"state: the tensor {_value!r}", state("state", "model", "first.weight", to={"$tensor": _value}))
_kind("state: a tensor's name dropped", state("state", "model", "first.weight", drop=True))
_kind("state: a tensor named twice", state("state", "model", "again", to={"$tensor": WEIGHT}))
_kind("state: param_groups a mapping", state("state", "optimizer", "param_groups", to={}))
_kind(
    "state: params of a group are numbers",
    state("state", "optimizer", "param_groups", "0", "params", to=[0, 1]),
)
_kind("rng: of no rank", state("rng", "0", drop=True))
_kind("rng: a text", state("rng", "0", to="random"))
_kind("rng: another tensor's place", state("rng", "0", "torch", to={"$tensor": "0.python.words"}))

# ---- pickle and zip

for _where, _format in (("tensors.pt", "full"), ("rng.pt", "full")):
    _kind(f"{_where}: a call", pickled(b"\x80\x02" + GLOBAL_MKDIR + b"X\x03\0\0\0ran\x85R.", _where), _format)
    _kind(f"{_where}: far into the memo", pickled(FAR_MEMO, _where), _format)
    _kind(f"{_where}: a million tuples in each other", pickled(NESTED, _where), _format)
    _kind(f"{_where}: 600,000 dicts", pickled(DICTS, _where), _format)
    _kind(f"{_where}: no end", pickled(lambda data: data[:-1], _where), _format)
    _kind(f"{_where}: half a pickle", pickled(lambda data: data[: len(data) // 2], _where), _format)
    _kind(f"{_where}: no opcodes", pickled(b"\xff" * 100, _where), _format)
    _kind(
        f"{_where}: a bytearray of 4 GB",
        tensors(lambda c: {**c, "b": Bomb(bytearray, 4 << 30)}, _where),
        _format,
    )
    _kind(f"{_where}: a list", tensors(lambda c: [1, 2], _where), _format)
    _kind(f"{_where}: int keys", tensors(lambda c: dict(enumerate(c.values())), _where), _format)
    _kind(f"{_where}: texts in place of tensors", tensors(lambda c: dict.fromkeys(c, "x"), _where), _format)
    _kind(
        f"{_where}: packed", zipped(lambda records: None, _where, compression=zipfile.ZIP_DEFLATED), _format
    )
_kind("tensors.pt: one number expanded to 10^9", put(weight=torch.ones(1).expand(10**9)))
_kind("tensors.pt: a storage of 4 GB without a record", put(weight=Bomb(torch.UntypedStorage, 4 << 30)))
_kind("tensors.pt: sparse", put(weight=torch.eye(7, 5).to_sparse()))
_kind("tensors.pt: meta", put(weight=torch.empty(7, 5, device="meta")))
_kind("tensors.pt: a meta tensor of 2^60", put(weight=torch.empty(1 << 60, device="meta")))
_kind("tensors.pt: a name with escapes", tensors(lambda c: c | {ESCAPE: torch.ones(1)}))
_kind("tensors.pt: a tensor less", tensors(lambda c: {k: v for k, v in c.items() if k != WEIGHT}))
_kind(
    "tensors.pt: larger shapes than records",
    pickled(lambda data: data.replace(b"K\x07K\x05", b"M\xff\xffM\xff\xff")),
)
_kind(
    "tensors.pt: more numbers than records",
    pickled(lambda data: data.replace(b"K\x23t", b"J\xff\xff\xff\x7ft")),
)
_kind("tensors.pt: a negative offset", pickled(lambda data: data.replace(b"QK\x00", b"QJ\xff\xff\xff\xff")))
_kind("tensors.pt: of torch before 1.6", lambda d: (old_style(d / "tensors.pt"), sign(d)))
_kind(
    "tensors.pt: another byte order",
    zipped(
        lambda r: r.__setitem__(slice(None), [(n, b"big" if n.endswith("byteorder") else v) for n, v in r])
    ),
)
_kind("tensors.pt: no data.pkl", zipped(lambda r: r.remove(next(x for x in r if x[0].endswith("data.pkl")))))
_kind("tensors.pt: data.pkl twice", zipped(lambda r: r.append(("other/data.pkl", b"\x80\x02}."))))
_kind(
    "tensors.pt: DATA.PKL too",
    zipped(lambda r: r.append((r[0][0].replace("data.pkl", "DATA.PKL"), b"\x80\x02}."))),
)
_kind(
    "tensors.pt: a record named with escapes",
    zipped(lambda r: r.append((r[0][0] + ESCAPE, b"")), compression=8),
)
_kind(
    "tensors.pt: TorchScript",
    zipped(lambda r: r.append((r[0][0].replace("data.pkl", "constants.pkl"), b"\x80\x02)."))),
)
_kind("tensors.pt: something before it", raw(lambda data: b"#!/bin/sh\n" + data))
_kind("tensors.pt: something after it", raw(lambda data: data + b"\0" * 100))
_kind("tensors.pt: cut in half", raw(lambda data: data[: len(data) // 2]))
_kind("tensors.pt: two archives", raw(lambda data: data + data))
_kind("tensors.pt: 65,534 records", end_record(10, "<H", 65_534))
_kind("tensors.pt: a directory of 4 GB", end_record(12, "<I", 0xFFFFFFFE))
_kind("tensors.pt: a directory elsewhere", end_record(16, "<I", 0))
_kind("tensors.pt: a comment", end_record(20, "<H", 7))
_kind("rng.pt: of no generator", tensors(lambda c: {}, "rng.pt"))


def old_style(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)


# ---- the metadata and the shards of the other format

for _name, _data in {
    "a call": b"\x80\x04" + GLOBAL_MKDIR + b"X\x03\0\0\0ran\x85R.",
    "a call, by its stack": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c\x03ran\x85R.",
    "a call, as of old": b"(X\x03\0\0\0ranicposix\nmkdir\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"Pposix\n.",
    "far into the memo": FAR_MEMO,
    "far into the memo, in words": b"N" + b"p600000000\n.",
    "a million tuples in each other": NESTED,
    "600,000 dicts": DICTS,
    "600,000 sets": b"\x80\x04(" + b"\x8f" * 600_000 + b"l.",
    "a frame of 2^62 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"N.",
    "bytes of 4 GB": b"\x80\x04B\xff\xff\xff\xff.",
    "a bytearray of 2^62 bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
    "an int of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "protocol 255": b"\x80\xffN.",
    "an empty stack": b"\x80\x040000.",
    "no mark": b"\x80\x04t.",
    "a memo never filled": b"\x80\x04h\x07.",
    "nothing but None": b"\x80\x04N.",
    "a zip bomb": deflate(b"PK\5\6" + b"\0" * 18),
}.items():
    _kind(f".metadata: {_name}", file_bytes(".metadata", _data), "sharded")
_kind(".metadata: 10^9 numbers in a few bytes", of_weight(size=torch.Size([10**9])), "sharded")
_kind(
    ".metadata: 10^9 numbers, all in one chunk",
    lambda d: (chunks(([0], [10**9]))(d), of_weight(size=torch.Size([10**9]))(d)),
    "sharded",
)
_kind(".metadata: 2^40 x 2^40 numbers", of_weight(size=torch.Size([1 << 40, 1 << 40])), "sharded")
_kind(".metadata: 100 dimensions", of_weight(size=torch.Size([1] * 100)), "sharded")
_kind(".metadata: a size that is a text", of_weight(size="7x5"), "sharded")
_kind(".metadata: sizes that are floats", of_weight(size=(7.0, 5.0)), "sharded")
_kind(".metadata: no chunks", of_weight(chunks=[]), "sharded")
_kind(".metadata: chunks a text", of_weight(chunks="none"), "sharded")
_kind(".metadata: no properties", of_weight(properties=None), "sharded")
_kind(".metadata: a gap between chunks", chunks(([0, 0], [3, 5]), ([4, 0], [3, 5])), "sharded")
_kind(".metadata: an overlap of chunks", chunks(([0, 0], [4, 5]), ([3, 0], [4, 5])), "sharded")
_kind(".metadata: an overlap that hides a gap", chunks(([0, 0], [4, 5]), ([2, 0], [3, 5])), "sharded")
_kind(".metadata: a chunk beyond the tensor", chunks(([0, 0], [7, 5]), ([7, 0], [1, 5])), "sharded")
_kind(".metadata: a chunk of fewer dimensions", chunks(([0], [7])), "sharded")
_kind(".metadata: a chunk before the tensor", chunks(([-1, 0], [8, 5])), "sharded")
_kind(".metadata: a corner missing", chunks(([0, 0], [7, 4]), ([0, 4], [6, 1])), "sharded")
_kind(
    ".metadata: a tensor of bytes",
    metadata(lambda m: m.state_dict_metadata.update({WEIGHT: BytesStorageMetadata()})),
    "sharded",
)
_kind(
    ".metadata: a name with escapes",
    metadata(lambda m: m.state_dict_metadata.update({ESCAPE: m.state_dict_metadata[WEIGHT]})),
    "sharded",
)
_kind(
    ".metadata: a name that is a number",
    metadata(lambda m: m.state_dict_metadata.update({7: m.state_dict_metadata[WEIGHT]})),
    "sharded",
)
_kind(".metadata: a tensor less", metadata(lambda m: m.state_dict_metadata.pop(WEIGHT)), "sharded")
_kind(".metadata: no places", metadata(lambda m: setattr(m, "storage_data", None)), "sharded")
_kind(".metadata: one place less", metadata(lambda m: m.storage_data.popitem()), "sharded")
_kind(".metadata: a list", metadata(lambda m: [m]), "sharded")
for _name, _value in {
    "relative_path": "state.json\0",
    "relative_path ": "nowhere.distcp",
    "relative_path  ": 5,
    "offset": -1,
    "offset ": 10**12,
    "offset  ": "0",
    "length": -1,
    "length ": 1 << 62,
    "length  ": 0,
    "transform_descriptors": ["zstd"],
}.items():
    _kind(f".metadata: {_name.strip()} {_value!r}", place(**{_name.strip(): _value}), "sharded")
_kind(".metadata: a place in state.json", place(relative_path="state.json", offset=0, length=1000), "sharded")
_kind("shard: another shape", item(torch.ones(5, 7)), "sharded")
_kind("shard: another dtype", item(torch.ones(7, 5, dtype=torch.int32)), "sharded")
_kind("shard: a list", item([1]), "sharded")
_kind("shard: a bytearray of 4 GB", item(Bomb(bytearray, 4 << 30)), "sharded")
_kind("shard: a call", item(Bomb(os.mkdir, "ran")), "sharded")
_kind("shard: packed", item(torch.ones(7, 5), deflate), "sharded")
_kind("shard: one number expanded", item(torch.ones(1).expand(10**9)), "sharded")
_kind("shard: sparse", item(torch.eye(7, 5).to_sparse()), "sharded")
_kind("shard: meta", item(torch.empty(7, 5, device="meta")), "sharded")
_kind("shard: garbage", lambda d: place(offset=1)(d), "sharded")

# ---- what is whole, but fits no run like this

_GROUP = ("state", "optimizer", "param_groups", "0")
_MOMENTS = {"step": 2.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
MISFITS |= {
    "lr a text": state(*_GROUP, "lr", to="0.1"),
    "lr with escapes": state(*_GROUP, "lr", to=ESCAPE),
    "one beta": state(*_GROUP, "betas", to={"$tuple": [0.9]}),
    "no eps": state(*_GROUP, "eps", drop=True),
    "betas of an unknown kind": state(*_GROUP, "betas", to={"$pickle": "x"}),
    "betas of a number": state(*_GROUP, "betas", to={"$tuple": 5}),
    "betas a dtype that is a function": state(*_GROUP, "betas", to={"$dtype": "load"}),
    "betas a mapping by lists": state(*_GROUP, "betas", to={"$dict": [[[1], 2]]}),
    "betas a mapping of singles": state(*_GROUP, "betas", to={"$dict": [[1]]}),
    "another parameter's state": state("state", "optimizer", "state", "none", to={"step": 1}),
    "a parameter's state a text": state("state", "optimizer", "state", "unused", to="gone"),
    "last_epoch a text": state("state", "schedule", "last_epoch", to="2"),
    "no last_epoch": state("state", "schedule", "last_epoch", drop=True),
    "base_lrs empty": state("state", "schedule", "base_lrs", to=[]),
    "base_lrs texts": state("state", "schedule", "base_lrs", to=["a"]),
    "a schedule's step() replaced": state("state", "schedule", "step", to="gone"),
    "a schedule's optimizer replaced": state("state", "schedule", "optimizer", to="gone"),
    "the scale a text": state("state", "scaler", "scale", to="1"),
    "no scale": state("state", "scaler", "scale", drop=True),
    "no exp_avg": state("state", "optimizer", "state", "unused", to={"step": 2.0}),
    "exp_avg a text": state("state", "optimizer", "state", "unused", to=_MOMENTS | {"exp_avg": "gone"}),
    "exp_avg of another shape": tensors(lambda c: c | {"optimizer.state.first.bias.exp_avg": torch.ones(1)}),
    "words of the generator cut short": tensors(
        lambda c: c | {"0.python.words": c["0.python.words"][:10]}, "rng.pt"
    ),
    "words beyond 32 bits": tensors(lambda c: c | {"0.python.words": c["0.python.words"] << 20}, "rng.pt"),
    "words that are fractions": tensors(lambda c: c | {"0.python.words": c["0.python.words"] / 3}, "rng.pt"),
    "torch's generator cut short": tensors(lambda c: c | {"0.torch": c["0.torch"][:100]}, "rng.pt"),
    "torch's generator all ones": tensors(
        lambda c: c | {"0.torch": torch.full_like(c["0.torch"], 255)}, "rng.pt"
    ),
    "NumPy's key cut short": tensors(lambda c: c | {"0.numpy.key": c["0.numpy.key"][:10]}, "rng.pt"),
    "NumPy's position far beyond": state("rng", "0", "numpy", "pos", to=10**9),
    "NumPy's position negative": state("rng", "0", "numpy", "pos", to=-1),
    "another bit generator": state("rng", "0", "numpy", "bit_generator", to="PCG64"),
    "Python's next gauss a text": state("rng", "0", "python", "gauss_next", to="g"),
    "no words at all": state("rng", "0", "python", to={}),
    "a weight of another shape": tensors(lambda c: c | {WEIGHT: torch.ones(5, 7)}),
    "a weight of another dtype": tensors(lambda c: c | {WEIGHT: torch.ones(7, 5, dtype=torch.float64)}),
}


# ---- weights for model.init_from


def _weights(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


FILES |= {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a directory": lambda path: path.mkdir(),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "4 TB of nothing": _sparse(1 << 42),
    "int keys": _weights({0: torch.ones(1)}),
    "sparse": _weights({"first.weight": torch.eye(5).to_sparse()}),
    "meta": _weights({"first.weight": torch.empty(7, 5, device="meta")}),
    "expanded": _weights({"first.weight": torch.ones(1).expand(10**9)}),
    "a bytearray of 4 GB": _weights({"first.weight": torch.ones(7, 5), "b": Bomb(bytearray, 4 << 30)}),
    "a call": _weights({"first.weight": Bomb(os.mkdir, "ran")}),
    "a name with escapes": _weights({ESCAPE: torch.ones(1)}),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"first.weight": 1})),
    "a pickled call": lambda path: path.write_bytes(b"\x80\x02" + GLOBAL_MKDIR + b"X\x03\0\0\0ran\x85R."),
    "a list": _weights([torch.ones(1)]),
    "nothing": _weights({}),
    "nested containers": _weights({"model": {"model": {"first.weight": torch.ones(7, 5)}}}),
}
