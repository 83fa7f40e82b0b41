"""A checkpoint opened for reading: its facts and its tensors."""

import bisect
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.expected import not_finite
from trainer.checkpoint.hashing import check_blocks
from trainer.checkpoint.layout import Index, index_from_json, num_rows, own_rows
from trainer.checkpoint.manifest import Manifest, open_listed, read_manifest, step_in_name, verify
from trainer.checkpoint.matching import Shapes, first_five, of_modules_own
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.safetensors_files import Stored, as_tensor, read_header, stored_as
from trainer.checkpoint.tree import put_together, tensor_names
from trainer.distributed.gather_shards import as_bytes
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import MAX_JSON_BYTES, Fields, printable, read_json
from trainer.local_shard import to_local
from trainer.optim.train_state import Progress

STATE = "state.json"
MODEL_CONFIG = "model_config"  # in the facts: the config.json of a Hugging Face model
PLACES = "places"  # in the facts: the position of each rank's data
_OF_TRAINED = ("model.", "ema.weights.")
_NUM_THREADS = 4
_BUFFER_BYTES = 1 << 25
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class Source:
    """What ``open`` found in a directory.

    Attributes:
        facts: strategy, world_size, torch_version, config, and the JSON parts of the state and of the places.
        index: where each tensor is.
    """

    directory: Location
    manifest: Manifest
    facts: dict[str, Any]
    index: Index
    _stored: Mapping[tuple[str, str], Stored]  # by file and key

    @classmethod
    def open(cls, directory: Location) -> "Source":
        """Read all but the tensors.

        Raises:
            UserError: ``directory`` cannot be read, or is not a checkpoint; a file or a tensor is missing; or
                its contents contradict each other.
        """
        manifest = read_manifest(directory)
        if STATE not in manifest.files:
            raise UserError(f"{printable(directory)} is not whole: its manifest lacks {STATE}")
        facts, tensors = _read_facts(directory, manifest)
        index = index_from_json(tensors)
        path = directory / STATE
        _compare_names(path, [*tensor_names(facts["state"]), *tensor_names(facts[PLACES])], index)
        return cls(directory, manifest, facts, index, _find(directory, manifest, index))

    @property
    def shapes(self) -> Shapes:
        """The shape and dtype of each tensor of the state, by its name."""
        return {
            name: (entry.shape, entry.dtype)
            for name, entry in self.index.items()
            if not name.startswith(f"{PLACES}.")
        }

    @property
    def seed(self) -> int:
        """The seed of the run that saved this. UserError if it names none."""
        return Fields(f"{self.directory / STATE}: config", self.facts["config"]).count("seed")

    @property
    def progress(self) -> Progress:
        """The run's progress, in a new object."""
        return Progress(**self.facts["state"]["progress"])

    def check(self, part: int, parts: int) -> None:
        """Verify part ``part`` of ``parts``. UserError if it is damaged, or has NaN or Inf."""
        groups = self.facts["state"]["optimizer"]["param_groups"]
        trained = {f"{of}{name}" for group in groups for name in group["params"] for of in _OF_TRAINED}
        begun = set(self.facts.get("not_finite", ()))
        numbers: dict[str, list[tuple[int, int, torch.dtype, str]]] = {
            name: [] for name in self.manifest.files
        }
        for name, entry in self.index.items():
            dtype = _REAL.get(entry.dtype, entry.dtype)
            if (name in trained or name.startswith("optimizer.")) and name not in begun:
                for chunk in entry.chunks if dtype.is_floating_point else ():
                    place = self._stored[chunk.file, chunk.key]
                    numbers[chunk.file].append((place.begin, place.end, dtype, name))
        for of_file in numbers.values():
            of_file.sort(key=lambda number: number[0])

        def look(file: str, offset: int, block: memoryview) -> None:
            of_file = numbers[file]
            first = bisect.bisect_right(of_file, offset, key=lambda number: number[1])
            for begin, end, dtype, name in of_file[first:]:
                begin += max(0, -(-(offset - begin) // dtype.itemsize)) * dtype.itemsize
                count = (min(end, offset + len(block)) - begin) // dtype.itemsize
                if begin >= offset + len(block):
                    break
                if count > 0:
                    here = torch.frombuffer(block, dtype=dtype, count=count, offset=begin - offset)
                    if kinds := not_finite({name: here}):
                        held = " and ".join(sorted(kinds[name]))
                        raise UserError(f"{printable(self.directory)}: {printable(name)} holds {held}")

        verify(self.directory, part, parts, look)

    def places(self) -> list[dict[str, Any]]:
        """The position of each rank's data, from its loader."""
        found = self._read(tensor_names(self.facts[PLACES]))
        copies = {name: tensor.clone() for name, tensor in found.items()}  # a stream may keep them
        places: list[dict[str, Any]] = put_together(self.facts[PLACES], copies, PLACES)
        return places

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors by their names: whole ones, or this rank's rows of sharded ones."""
        by_file: dict[str, list[tuple[str, int, Tensor]]] = {}
        for name, target in targets.items():
            (begin, end), here = own_rows(target), to_local(target)
            for chunk in self.index[name].chunks:
                first, last = max(begin, chunk.begin), min(end, chunk.begin + num_rows(chunk.shape))
                if first < last:
                    rows = here[first - begin : last - begin] if here.ndim else here
                    place = self._stored[chunk.file, chunk.key]
                    row_bytes = (place.end - place.begin) // num_rows(chunk.shape)
                    offset = place.begin + (first - chunk.begin) * row_bytes
                    by_file.setdefault(chunk.file, []).append((name, offset, rows))
        with torch.no_grad(), ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint") as threads:
            for name, parts in by_file.items():
                with open_listed(self.directory, self.manifest, name) as file:
                    reads: list[Future[None]] = [
                        threads.submit(_fill, file, offset, rows, self.index[of].dtype)
                        for of, offset, rows in parts
                    ]
                    for read in reads:
                        read.result()

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """The whole tensors with names that begin with ``prefix``, by the rest of the name. Not collective.

        A tensor that was saved as one chunk is mapped from its file and read when used.
        """
        found = self._read([name for name in self.shapes if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        needed = sorted({chunk.file for name in names for chunk in self.index[name].chunks})
        read: dict[tuple[str, str], Tensor] = {}  # a tensor with several names is read once
        found = {}
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(open_listed(self.directory, self.manifest, name)) for name in needed
            }
            for name in names:
                entry = self.index[name]
                first = entry.chunks[0]
                if (first.file, first.key) not in read:
                    places = [self._stored[chunk.file, chunk.key] for chunk in entry.chunks]
                    parts = [
                        as_tensor(files[chunk.file].part(place.begin, place.end), entry.dtype, chunk.shape)
                        for chunk, place in zip(entry.chunks, places, strict=True)
                    ]
                    read[first.file, first.key] = torch.cat(parts) if len(parts) > 1 else parts[0]
                found[name] = read[first.file, first.key]
        return found

    def weights(self, averaged: bool) -> dict[str, Tensor]:
        """The model's state; with `averaged`, the moving averages that `ema.decay` kept in place of weights.

        Raises:
            UserError: there are no averages.
        """
        averages = self.read("ema.weights.") if averaged else {}
        if averaged and not averages:
            raise UserError(f"{printable(self.directory)} holds no averages: its run had ema.decay=null")
        weights = self.read("model.")
        return {name: weights[name] for name in weights if not of_modules_own(name)} | averages


def _fill(file: PlainFile, offset: int, rows: Tensor, dtype: torch.dtype) -> None:
    """Read the bytes of `rows` from `offset` on: into its memory, or through a buffer."""
    if rows.is_cpu and rows.is_contiguous() and rows.dtype == dtype:
        file.read_into(offset, as_bytes(rows))
        return
    row_bytes = max(1, rows[:1].numel() * dtype.itemsize) if rows.ndim else dtype.itemsize
    for some in rows.split(max(1, _BUFFER_BYTES // row_bytes)) if rows.ndim else (rows,):
        memory = torch.empty(some.shape, dtype=dtype)
        file.read_into(offset, as_bytes(memory))
        some.copy_(memory)
        offset += memory.numel() * dtype.itemsize


def whole(directory: Location, part: int = 0, parts: int = 1) -> Source:
    """The checkpoint in ``directory``, found to be complete, undamaged and sound.

    With ``parts``, each of that many readers checks one part of the files.

    Raises:
        UserError: it is not; the message says why.
    """
    try:
        source = Source.open(directory)
    except UserError:
        verify(directory)  # if it is damaged, this says so
        raise
    source.check(part, parts)
    return source


def check_size(state_bytes: int, num_bytes: int) -> None:
    """UserError if STATE is larger than the limit for a checkpoint of ``num_bytes``."""
    limit = max(MAX_JSON_BYTES, num_bytes // 64)
    if state_bytes > limit:
        raise UserError(
            f"{STATE} has {state_bytes:,} bytes, and more than {limit:,} are not read: keep large parts of "
            "a module's extra state in tensors, or bytes"
        )


def _find(directory: Location, manifest: Manifest, index: Index) -> dict[tuple[str, str], Stored]:
    """Where the chunks are. UserError if the headers of the files do not list exactly these."""
    path, named = (
        printable(directory / STATE),
        {chunk.file for entry in index.values() for chunk in entry.chunks},
    )
    if foreign := sorted(named ^ (manifest.files.keys() - {STATE})):
        raise UserError(f"{path} and the manifest do not name the same files: {first_five(foreign)}")
    found: dict[tuple[str, str], Stored] = {}
    for name in sorted(named):
        with open_listed(directory, manifest, name) as file:
            found |= {(name, key): stored for key, stored in read_header(file).items()}
    used = set()
    for name, entry in index.items():
        for chunk in entry.chunks:
            stored, place = found.get((chunk.file, chunk.key)), f"{printable(chunk.key)} in {chunk.file}"
            if stored is None:
                raise UserError(f"{path} names {place}, which is not there")
            if (stored.dtype, stored.shape) != stored_as(entry.dtype, chunk.shape):
                raise UserError(f"{path} has another size or dtype of {printable(name)} than {place}")
            used.add((chunk.file, chunk.key))
    if left := sorted(f"{key} in {file}" for file, key in found.keys() - used):
        raise UserError(f"{path} does not name {first_five(left)}")
    return found


def _read_facts(directory: Location, manifest: Manifest) -> tuple[dict[str, Any], Fields]:
    """The contents of state.json, with checked types, and its index of tensors."""
    path = directory / STATE
    with open_listed(directory, manifest, STATE) as file:
        check_size(file.size, manifest.num_bytes)
        data = file.read(file.size)
        check_blocks(file, manifest.files[STATE], range(len(manifest.files[STATE].sha256)))
    facts = Fields(str(path), read_json(path, data))
    facts.text("strategy"), facts.text("torch_version"), facts.mapping("config")
    state, places = facts.mapping("state"), facts.sequence(PLACES, of=dict)
    for section in ("model", "schedule", "scaler", "buffers", "ema"):
        state.mapping(section)
    optimizer = state.mapping("optimizer")
    optimizer.mapping("state")
    for index, group in enumerate(optimizer.sequence("param_groups")):
        Fields(f"{path}: param_groups.{index}", group).sequence("params", of=str)
    saved = state.mapping("progress")
    progress = Progress(**{name: saved.count(name) for name in asdict(Progress())})
    if facts.has("num_samples"):  # without: a stream
        facts.count("num_samples")
    if facts.has(MODEL_CONFIG):
        facts.mapping(MODEL_CONFIG)
    if facts.has("exact"):
        exact = facts.mapping("exact")
        exact.count("leaves"), exact.count("since"), exact.mapping("ground")
    if facts.has("not_finite"):
        facts.sequence("not_finite", of=str)
    if facts.count("world_size") < 1:
        raise UserError(f"{printable(path)} has world_size 0")
    if len(places) != facts.values["world_size"]:
        raise UserError(f"{printable(path)} has {len(places)} places of {facts.values['world_size']} ranks")
    named = step_in_name(directory)
    if not progress.step == manifest.step == (manifest.step if named is None else named):
        raise UserError(
            f"{printable(directory)} contradicts itself: its state is of step {progress.step}, its "
            f"manifest of step {manifest.step}; its name must be step_{manifest.step:08d}"
        )
    values = {**facts.values, "state": {**state.values, "progress": asdict(progress)}}
    return values, facts.mapping("tensors")


def _compare_names(path: Location, named: list[str], index: Index) -> None:
    """UserError unless the index has every tensor that the state names, once, and no others."""
    if missing := sorted(set(named) - set(index)):
        raise UserError(f"{printable(path)} names tensors that are not there: {first_five(missing)}")
    if sorted(named) != sorted(index):
        foreign = sorted(set(index) - set(named)) or ["some twice"]
        raise UserError(f"{printable(path)} does not name the tensors that are there: {first_five(foreign)}")
