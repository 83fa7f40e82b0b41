"""Hundreds of hostile checkpoints: real ones with changed files, JSON and headers.

Each ``kind`` is a function that changes a copy of an intact checkpoint of two steps. The manifest is signed again
afterwards (a stranger can do that), unless the kind is about the manifest.
"""

import contextlib
import hashlib
import json
import math
import os
import pickle
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.hashing import BLOCK_BYTES
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.safetensors_files import NAMES

STEP = "step_00000002"
MODEL, OPTIM = "model-00000-of-00001.safetensors", "optim-00000-of-00001.safetensors"
SHARD = "model-00001-of-00002.safetensors"
WEIGHT = "model.first.weight"  # of 7 x 5, sharded in 4 and 3 rows
ESCAPE = "x\x1b[2K\nforged: intact\u202e"

Change = Callable[[Path], Any]
KINDS: dict[str, tuple[str, Change]] = {}  # name: (format it applies to, what to do)
MISFITS: dict[str, Change] = {}  # intact, but of no use to this run: not passed over
FILES: dict[str, Change] = {}  # for model.init_from


def _kind(name: str, change: Change, format: str = "full") -> None:
    assert name not in KINDS, name
    KINDS[name] = (format, change)


# ---- the tools


def sign(directory: Path, **changes: Any) -> None:
    """Make the manifest agree with the present files, and with ``changes`` (of raw JSON)."""
    raw = json.loads((directory / MANIFEST).read_text())
    for name in raw["files"]:
        path = directory / name
        if path.exists() and stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size < 1 << 30:
            data = path.read_bytes()
            blocks = [data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES)]
            hashes = [hashlib.sha256(block).hexdigest() for block in blocks]
            raw["files"][name] = {"bytes": len(data), "sha256": hashes}
        elif path.exists():
            size = path.lstat().st_size
            raw["files"][name] = {"bytes": size, "sha256": ["0" * 64] * min(9999, -(-size // BLOCK_BYTES))}
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
    """The manifest's entry of the model's file."""

    def change(directory: Path) -> None:
        raw = json.loads((directory / MANIFEST).read_text())
        raw["files"][MODEL] |= digest
        write_manifest(directory, raw)

    return change


def also_listed(name: str) -> Change:
    def change(directory: Path) -> None:
        raw = json.loads((directory / MANIFEST).read_text())
        raw["files"][name] = raw["files"][MODEL]
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


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def _sparse(size: int, begin: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, size)

    return make


def raw(edit: Callable[[bytes], bytes], name: str = MODEL) -> Change:
    return lambda directory: file_bytes(name, edit((directory / name).read_bytes()))(directory)


def read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_file(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def header(edit: Callable[[dict[str, Any]], Any], name: str = MODEL) -> Change:
    """The header of a file edited in place, or replaced by what `edit` returns."""

    def change(directory: Path) -> None:
        found, data = read_file(directory / name)
        made = edit(found)
        write_file(directory / name, found if made is None else made, data)
        sign(directory)

    return change


def of_weight(**changes: Any) -> Change:
    return header(lambda found: found["first.weight"].update(changes))


def place(number: int = 0, **changes: Any) -> Change:
    """A chunk of the weight in the index."""

    def change(directory: Path) -> None:
        facts = json.loads((directory / "state.json").read_text())
        facts["tensors"][WEIGHT]["chunks"][number] |= changes
        (directory / "state.json").write_text(json.dumps(facts))
        sign(directory)

    return change


def put(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A tensor of one chunk replaced by another, in its file and in the index."""

    def change(directory: Path) -> None:
        facts = json.loads((directory / "state.json").read_text())
        entry = facts["tensors"][name]
        (chunk,) = entry["chunks"]
        path = directory / chunk["file"]
        found, data = read_file(path)
        metadata, out = found.pop("__metadata__"), b""
        for key, stored in found.items():
            begin, end = stored["data_offsets"]
            part = data[begin:end]
            if key == chunk["key"]:
                dtype = getattr(torch, entry["dtype"])
                value = edit(torch.frombuffer(bytearray(part), dtype=dtype).reshape(entry["shape"]))
                part = value.contiguous().numpy().tobytes()
                shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
                entry["shape"], chunk["shape"], entry["dtype"] = shape, shape, dtype
                stored |= {"dtype": NAMES[value.dtype], "shape": shape}
            stored["data_offsets"] = [len(out), len(out) + len(part)]
            out += part
        write_file(path, {"__metadata__": metadata, **found}, out)
        (directory / "state.json").write_text(json.dumps(facts))
        sign(directory)

    return change


def swapped(directory: Path) -> None:
    """Two files with exchanged names."""
    (directory / MODEL).rename(directory / "x")
    (directory / OPTIM).rename(directory / MODEL)
    (directory / "x").rename(directory / OPTIM)
    sign(directory)


class Bomb:
    """Pickles as ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


# ---- files

for _name in (MANIFEST, "state.json", MODEL, OPTIM):
    _kind(f"{_name}: a FIFO", in_place(_name, os.mkfifo))
    _kind(f"{_name}: a link to /dev/zero", in_place(_name, lambda path: path.symlink_to("/dev/zero")))
    _kind(f"{_name}: a directory", in_place(_name, lambda path: path.mkdir()))
    _kind(f"{_name}: a socket", in_place(_name, _socket))
    _kind(f"{_name}: a link to itself", in_place(_name, lambda path: path.symlink_to(path.name)))
    _kind(f"{_name}: a link to the right file", in_place(_name, lambda path: path.symlink_to("../../moved")))
    _kind(f"{_name}: 4 TB of nothing", in_place(_name, _sparse(1 << 42)))
    _kind(f"{_name}: gone", lambda d, name=_name: (d / name).unlink())
    _kind(f"{_name}: empty", raw(lambda data: b"", _name) if _name != MANIFEST else manifest_bytes(b""))
    if os.geteuid() == 0:
        _kind(f"{_name}: a device", in_place(_name, _device))
_kind("state.json: 100 MB of nothing", in_place("state.json", _sparse(100 << 20)))
_kind(
    f"{MODEL}: a header of 32 MB, then 4 TB of nothing",
    in_place(MODEL, _sparse(1 << 42, (1 << 25).to_bytes(8, "little"))),
)
_kind("two files swapped", swapped)
_kind("a file too many", lambda d: ((d / "x").write_text("x"), also_listed("x")(d), sign(d)))

# ---- JSON

for _value in (math.inf, math.nan, "2", True, -2, 2**80, [2], None, 2.0):
    _kind(f"manifest: step {_value!r}", manifest(step=_value))
for _value in (math.inf, math.nan, -1.0, 1e300, "now", None):
    _kind(f"manifest: saved_at {_value!r}", manifest(saved_at=_value))
for _value in ({}, [], None, "all", {MODEL: 5}, {MODEL: {}}):
    _kind(
        f"manifest: files {_value!r}",
        lambda directory, value=_value: (sign(directory), sign_files(directory, value)),
    )


def sign_files(directory: Path, value: Any) -> None:
    raw = json.loads((directory / MANIFEST).read_text())
    write_manifest(directory, {**raw, "files": value})


for _value in (-1, 0, math.inf, "many", 2**70, 1.5):
    _kind(f"manifest: a file of {_value!r} bytes", listed(bytes=_value))
for _value in (7, [], [""], ["0" * 64, "0" * 64], [7], "0" * 64):
    _kind(f"manifest: sha256 {str(_value)[:20]!r}", listed(sha256=_value))
for _value in (ESCAPE, None, "md5", 5):
    _kind(f"manifest: algorithm {_value!r}", manifest(algorithm=_value))
for _value in ("../state.json", "a/b", "", "..", "nul\0", ESCAPE, "n" * 100_000, "\ud800", MANIFEST):
    _kind(f"manifest: also the file {_value[:20]!r}", also_listed(_value))
for _value in (ESCAPE, "", None, "\ud800", ["full"]):
    _kind(f"manifest: format {_value!r}", manifest(format=_value))
for _value in ([], {"eval/loss": "low"}, {"eval/loss": None}, None):
    _kind(f"manifest: metrics {_value!r}", manifest(metrics=_value))
for _value in (1, 99, math.inf, "2"):
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
_kind("manifest: 300 kB of lists", manifest_bytes(b'{"a":[' + b"[]," * 100_000 + b"0]}"))
_kind("manifest: a list", manifest_bytes(b"[]"))
_kind("manifest: a text with escapes", manifest_bytes(json.dumps({ESCAPE: ESCAPE}).encode()))
_kind("manifest: something after it", in_manifest(lambda text: text + "{}"))
_kind("manifest: no sha256 of its own", in_manifest(lambda text: text.replace('"sha256"', '"sha257"')))

_kind("state.json: no JSON", file_bytes("state.json", b"hello"))
_kind("state.json: 100,000 brackets", file_bytes("state.json", b'{"state":' + b"[" * 100_000))
_kind("state.json: no UTF-8", file_bytes("state.json", b'{"state": "\xc3\x28"}'))
for _name in ("strategy", "world_size", "torch_version", "config", "state", "places", "tensors"):
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
_kind("places: of no rank", state("places", to=[]))
_kind("places: a text", state("places", to=["first"]))
_kind("places: a tensor of the model", state("places", to=[{"$tensor": WEIGHT}]))

# ---- headers

for _name, _format in ((MODEL, "full"), (OPTIM, "full"), (SHARD, "sharded")):
    for _title, _edit in {
        "cut in half": lambda data: data[: len(data) // 2],
        "a byte less": lambda data: data[:-1],
        "a byte more": lambda data: data + b"\0",
        "something before it": lambda data: b"#!/bin/sh\n" + data,
        "twice": lambda data: data + data,
        "seven bytes": lambda data: data[:7],
        "only a length": lambda data: data[:8],
        "a header of no bytes": lambda data: bytes(8) + data[8:],
        "a header of 2^64 bytes": lambda data: b"\xff" * 8 + data[8:],
        "a header of 2^63 bytes": lambda data: (1 << 63).to_bytes(8, "little") + data[8:],
        "a header that is all of it": lambda data: (len(data) - 8).to_bytes(8, "little") + data[8:],
        "a header one byte short": lambda data: (
            (int.from_bytes(data[:8], "little") - 1).to_bytes(8, "little") + data[8:]
        ),
        "a pickle": lambda data: pickle.dumps(Bomb(os.mkdir, "ran")),
        "a zip of torch's": lambda data: b"PK\3\4" + data,
    }.items():
        _kind(f"{_name}: {_title}", raw(_edit, _name), _format)
    for _title, _text in {
        "100,000 brackets": b"[" * 100_000,
        "100,000 braces": b'{"a":' * 100_000,
        "1,000 braces, closed": b'{"a":' * 1_000 + b"1" + b"}" * 1_000,
        "an int of a million digits": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,'
        + b"9" * 1_000_000
        + b"]}}",
        "300 kB of lists": b'{"a":[' + b"[]," * 100_000 + b"0]}",
        "no UTF-8": b'{"\xff":1}',
        "a list": b"[]",
        "nothing": b"{}",
        "a key twice": b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    }.items():
        _kind(f"{_name}: {_title}", header(lambda found, text=_text: text, _name), _format)
for _value in ("F33", "f32", "F64", "I32", "U8", ESCAPE, None, 4, ["F32"], {}):
    _kind(f"header: dtype {_value!r}", of_weight(dtype=_value))
for _value in ([5, 7], [35], [], [7, 5, 1], [7], [-7, -5], [7.0, 5.0], "7x5", None, [True, 35], [1 << 62, 1 << 62],
               [1 << 40] * 40, [0, 1 << 61], [1] * 100, [7, "5"], {"0": 7}):  # fmt: skip
    _kind(f"header: shape {str(_value)[:60]}", of_weight(shape=_value))
for _value in ([0, 0], [0, 1 << 62], [-140, 0], [140, 0], [8, 148], [0, 140, 280], [0], None, "0-140", [0.0, 140.0],
               [1 << 62, (1 << 62) + 140], [10**30, 10**30 + 140], [None, 140]):  # fmt: skip
    _kind(f"header: offsets {_value}", of_weight(data_offsets=_value))
_kind("header: no dtype", header(lambda found: found["first.weight"].pop("dtype")))
_kind("header: no shape", header(lambda found: found["first.weight"].pop("shape")))
_kind("header: an entry that is a text", header(lambda found: found.update({"first.weight": "gone"})))
_kind("header: an entry that is a list", header(lambda found: found.update({"first.weight": []})))
_kind("header: a tensor less", header(lambda found: found.pop("first.weight") and None))
_kind("header: a tensor under another name", header(lambda f: f.update(again=f.pop("first.weight"))))
_kind("header: a name with escapes", header(lambda f: f.update({ESCAPE: f.pop("first.weight")})))
_kind("header: two tensors in one place", header(lambda f: f.update(again=f["first.weight"])))
_kind(
    "header: an empty tensor besides",
    header(lambda f: f.update(again={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})),
)
_kind(
    "header: overlapping tensors",
    header(lambda f: [each.update(data_offsets=[0, each["data_offsets"][1] - each["data_offsets"][0]])
                      for each in list(f.values())[1:]] and None),
)  # fmt: skip

# ---- the index

for _value in ("float33", "torch.float32", "load", "int32", "float64", "qint8", ESCAPE, None, 7, ["float32"]):
    _kind(f"index: dtype {_value!r}", state("tensors", WEIGHT, "dtype", to=_value))
for _value in ([5, 7], [8, 5], [6, 5], [35], [], [10**9], [1 << 40, 1 << 40], [7.0, 5.0], "7x5", None, [1] * 100, [-1, 5],
               [7, 5, 1]):  # fmt: skip
    _kind(f"index: shape {str(_value)[:40]}", state("tensors", WEIGHT, "shape", to=_value))
for _value in ([], "none", None, [5], [[]], [{}], {"0": {}}):
    _kind(f"index: chunks {_value!r}", state("tensors", WEIGHT, "chunks", to=_value))
for _key, _values in {
    "file": (
        OPTIM,
        "state.json",
        "../state.json",
        "/etc/passwd",
        MANIFEST,
        "nowhere",
        "",
        ESCAPE,
        5,
        None,
        "nul\0",
    ),
    "key": ("first.bias", "none", "", ESCAPE, 5, None),
    "begin": (-1, 1, 7, 1 << 62, 1 << 70, 0.5, "0", None, [0, 0]),
    "shape": ([5, 7], [35], [6, 5], [8, 5], [7, 4], [], [0, 5], "7x5", None, [7, -5]),
}.items():
    for _value in _values:
        _kind(f"chunk: {_key} {_value!r}", place(**{_key: _value}))
_kind(
    "index: a tensor twice the same chunk",
    place(1, key="first.weight", file="model-00000-of-00002.safetensors"),
    "sharded",
)
_kind("index: a gap between chunks", place(1, begin=5), "sharded")
_kind("index: chunks that overlap", place(1, begin=3), "sharded")
_kind("index: chunks in another order", lambda d: (place(0, begin=3)(d), place(1, begin=0)(d)), "sharded")
_kind("index: a chunk beyond the tensor", place(1, shape=[4, 5]), "sharded")
_kind("index: a chunk of other columns", place(1, shape=[3, 4]), "sharded")
_kind("index: a chunk of another file", place(1, file="optim-00001-of-00002.safetensors"), "sharded")
_kind(
    "index: a tensor that the state does not name",
    state(
        "tensors",
        "model.again",
        to={
            "dtype": "float32",
            "shape": [7, 5],
            "chunks": [{"file": MODEL, "key": "first.weight", "begin": 0, "shape": [7, 5]}],
        },
    ),
)
_kind("index: a tensor less", state("tensors", WEIGHT, drop=True))
_kind("index: an entry that is a text", state("tensors", WEIGHT, to="gone"))
_kind("a weight that is NaN", put(WEIGHT, lambda value: value * math.nan))
_kind("a moment that is Inf", put("optimizer.state.first.weight.exp_avg", lambda value: value + math.inf))

# ---- intact checkpoints that do not fit this run

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
    "exp_avg of another shape": put("optimizer.state.first.bias.exp_avg", lambda _: torch.ones(1)),
    "a weight of another shape": put(WEIGHT, lambda value: value.t()),
    "a weight of another dtype": put(WEIGHT, lambda value: value.double()),
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
    "a call in a list": _weights([Bomb(os.system, "mkdir ran")]),
    "a call": _weights({"first.weight": Bomb(os.mkdir, "ran")}),
    "a name with escapes": _weights({ESCAPE: torch.ones(1)}),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"first.weight": 1})),
    "a pickled call": lambda path: path.write_bytes(b"\x80\x02cposix\nmkdir\nX\x03\0\0\0ran\x85R."),
    "a list": _weights([torch.ones(1)]),
    "nothing": _weights({}),
    "nested containers": _weights({"model": {"model": {"first.weight": torch.ones(7, 5)}}}),
}
