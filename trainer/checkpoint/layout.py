"""Which rank writes which part of a save, and the index of where each tensor is."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.matching import is_extra_state
from trainer.checkpoint.safetensors_files import NAMES, sizes_in
from trainer.distributed.agreement import Agreement
from trainer.errors import UserError
from trainer.files.untrusted import Fields, printable
from trainer.local_shard import is_dtensor, is_sharded, num_rows, rows_of_shard, to_local

_MODEL = "model."
# Beside those of safetensors, which has no names for these: they are stored as bytes.
_OTHER_DTYPES = (
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*NAMES, *(getattr(torch, name) for name in _OTHER_DTYPES if hasattr(torch, name)))
}
"""What a checkpoint may hold, by the name in its index."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of a tensor, from ``begin`` on: the entry ``key`` of ``file``."""

    file: str
    key: str
    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class IndexEntry:
    """A tensor of a checkpoint; its chunks together are all its rows, in order."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Index = Mapping[str, IndexEntry]
"""By the name of a tensor in the state."""


def index_to_json(index: Index) -> dict[str, Any]:
    """The index as state.json has it, under `tensors`."""
    return {
        name: {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "chunks": [{**vars(chunk), "shape": list(chunk.shape)} for chunk in entry.chunks],
        }
        for name, entry in index.items()
    }


def index_from_json(fields: Fields) -> dict[str, IndexEntry]:
    """The inverse of `index_to_json`. UserError unless the chunks of each tensor are its rows, each once."""
    return {name: _entry(name, fields.mapping(name)) for name in fields.values}


def _entry(name: str, fields: Fields) -> IndexEntry:
    dtype, shape = DTYPES.get(fields.text("dtype")), sizes_in(fields.sequence("shape"))
    if dtype is None:
        fields.refuse("dtype", "one that a checkpoint may hold")
    if shape is None:
        fields.refuse("shape", "sizes of a tensor")
    chunks, files, rows, end = [], set[str](), num_rows(shape), 0
    for values in fields.sequence("chunks"):
        chunk = Fields(f"the place of {name}", values)
        sizes = sizes_in(chunk.sequence("shape"))
        if sizes is None or len(sizes) != len(shape) or sizes[1:] != shape[1:]:
            chunk.refuse("shape", f"some rows of {list(shape)}")
        chunks.append(Chunk(chunk.text("file"), chunk.text("key"), chunk.count("begin"), sizes))
        if chunks[-1].begin != end:
            chunk.refuse("begin", f"{end}, where the chunk before it ends")
        end += num_rows(sizes)
        if chunks[-1].file in files:
            chunk.refuse("file", "one for each chunk, as each is of another rank")
        files.add(chunks[-1].file)
    if end != rows or not chunks:
        raise UserError(f"the chunks of {printable(name)} are {end:,} of its {rows:,} rows")
    return IndexEntry(dtype, torch.Size(shape), tuple(chunks))


def _holders(tensor: Tensor, plain_on: Collection[int]) -> list[list[int]]:
    """For each copy of ``tensor``, the ranks that hold it together, in the order of its rows.

    Args:
        plain_on: the ranks that hold it if it is not a DTensor.
    """
    if not is_dtensor(tensor):
        return [[rank] for rank in plain_on]
    ranks = tensor.device_mesh.mesh
    return ranks.reshape(-1, ranks.shape[-1] if is_sharded(tensor) else 1).tolist()


@dataclass(frozen=True)
class Plan:
    """Which rank writes which part of a save, the same on every rank.

    Attributes:
        writers: by the name of a tensor, the ranks that write it, in the order of its rows; names are in the
            order of writing.
        aliases: names of tensors that are other names of those in ``writers``, such as tied weights; they are
            written once.
    """

    world_size: int
    gathered: bool  # rank 0 writes all
    writers: dict[str, list[int]]
    aliases: dict[str, str]

    def part_of(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Those of ``tensors`` that ``rank`` writes, or sends to the rank that writes them."""
        given = tensors.keys() & {name for name, ranks in self.writers.items() if rank in ranks}
        if self.gathered:
            given |= {name for name in self.writers.keys() & tensors.keys() if is_sharded(tensors[name])}
        return {name: tensors[name] for name in tensors if name in given}

    def file_of(self, name: str, rank: int) -> str:
        """The file to which ``rank`` writes a tensor; weights have files of their own, for other programs."""
        kind = "model" if _is_weight(name) else "optim"
        return f"{kind}-{rank:05d}-of-{1 if self.gathered else self.world_size:05d}.safetensors"

    def index(self, tensors: Mapping[str, Tensor]) -> dict[str, IndexEntry]:
        """Where each tensor will be. Called on rank 0, which has all ``tensors``."""
        entries = {name: self._entry(name, tensors[name]) for name in self.writers}
        return entries | {alias: entries[name] for alias, name in self.aliases.items()}

    def _entry(self, name: str, tensor: Tensor) -> IndexEntry:
        shape, writers = tuple(tensor.shape), self.writers[name]
        chunks = []
        for part, rank in enumerate(writers):
            begin, end = rows_of_shard(num_rows(shape), part, len(writers))
            if begin < end or part == 0:
                sizes = (end - begin, *shape[1:]) if shape else ()
                chunks.append(Chunk(self.file_of(name, rank), key_of(name), begin, sizes))
        return IndexEntry(tensor.dtype, tensor.shape, tuple(chunks))


def _is_weight(name: str) -> bool:
    """Whether a tensor of the state is one of the model's state dict, without the extra state of modules."""
    return name.startswith(_MODEL) and not is_extra_state(name)


def key_of(name: str) -> str:
    """The name of a tensor in its file: weights have their plain names there."""
    return name.removeprefix(_MODEL) if _is_weight(name) else name


def name_of(key: str, file: str) -> str:
    """The inverse of `key_of`."""
    return f"{_MODEL}{key}" if file.startswith("model-") else key


def plan_writers(
    tensors: Mapping[str, Tensor], only_rank_0: Collection[str], gathered: bool, agreement: Agreement
) -> Plan:
    """Decide which rank writes which of the live ``tensors``; each rank passes its own (a collective).

    Args:
        only_rank_0: names of the tensors that rank 0 writes in any case: running statistics follow a rank's
            own data, and those of rank 0 are the model's.
        gathered: whether rank 0 writes all. Otherwise each rank writes its own; of several that hold a
            tensor, the one with the least to write.
    """
    others = [name for name in tensors if name not in only_rank_0]
    layout = hashlib.sha256(
        repr([(n, tensors[n].shape, tensors[n].dtype) for n in others]).encode()
    ).hexdigest()
    are_alike = len(set(agreement.gather(layout))) == 1  # else only rank 0 writes plain tensors
    plain_on = range(agreement.world_size if are_alike and not gathered else 1)

    def decide() -> Plan:
        aliases = aliases_in(tensors)
        writers: dict[str, list[int]] = {}
        load = [0] * agreement.world_size
        for name in _in_order(tensors, aliases):
            tensor = tensors[name]
            copies = _holders(tensor, [0] if name in only_rank_0 else plain_on)
            writers[name] = [0] if gathered else min(copies, key=lambda ranks: max(load[r] for r in ranks))
            for rank in writers[name]:
                load[rank] += tensor.numel() * tensor.itemsize // len(writers[name])
        return Plan(agreement.world_size, gathered, writers, aliases)

    return agreement.on_main(decide)


def _in_order(tensors: Mapping[str, Tensor], aliases: Collection[str]) -> list[str]:
    """The names to write: in a file by falling size of element, so that each is aligned if it is mapped."""
    order = {name: (not _is_weight(name), -tensor.itemsize, name) for name, tensor in tensors.items()}
    return sorted(tensors.keys() - aliases, key=order.__getitem__)


def aliases_in(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By the name of a tensor, the name of an earlier one with the same memory."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        here = to_local(tensor)
        if here.numel() and not here.is_meta:
            place = (_is_weight(name), tensor.shape, here.dtype, here.device, here.data_ptr(), here.stride())
            if first.setdefault(place, name) != name:
                aliases[name] = first[place]
    return aliases
