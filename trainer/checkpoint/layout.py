"""Which rank writes which part of a save, and the index of where each tensor is."""

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.safetensors_files import NAMES
from trainer.checkpoint.tree import is_extra_state
from trainer.errors import UserError
from trainer.files.untrusted import printable
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

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Of tensors, by their names in a checkpoint."""


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


def index_from_json(tensors: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """The inverse of `index_to_json`.

    Raises:
        UserError: the chunks of a tensor are not its rows, each once.
        KeyError, TypeError, ValueError: it is nothing that `index_to_json` makes.
    """
    index = {}
    for name, entry in tensors.items():
        shape, end = torch.Size(entry["shape"]), 0
        chunks = tuple(Chunk(**{**chunk, "shape": tuple(chunk["shape"])}) for chunk in entry["chunks"])
        for chunk in chunks:
            if chunk.begin != end or chunk.shape[1:] != shape[1:] or len(chunk.shape) != len(shape):
                raise UserError(f"a chunk of {printable(name)} begins at row {chunk.begin}, not {end}")
            end += num_rows(chunk.shape)
        if end != num_rows(shape) or not chunks:
            raise UserError(f"the chunks of {printable(name)} are {end:,} of its {num_rows(shape):,} rows")
        index[name] = IndexEntry(DTYPES[entry["dtype"]], shape, chunks)
    return index


@dataclass(frozen=True)
class Plan:
    """Which rank writes which part of a save.

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
    tensors: Mapping[str, Tensor], only_rank_0: Collection[str], gathered: bool, alike: bool, world_size: int
) -> Plan:
    """Decide which rank writes which of the live ``tensors``: each rank decides the same of its own.

    Args:
        only_rank_0: names of the tensors that rank 0 writes in any case: running statistics follow a rank's
            own data, and those of rank 0 are the model's.
        gathered: whether rank 0 writes all. Otherwise each rank writes its own; of several that hold a
            tensor, the one with the least to write.
        alike: whether all ranks have tensors of the same names and sizes, besides ``only_rank_0``. If not,
            rank 0 writes all that are not sharded.
    """
    aliases = aliases_in(tensors)
    writers: dict[str, list[int]] = {}
    plain = [(0, rank) for rank in range(world_size if alike and not gathered else 1)]  # a heap
    sharded: dict[int, int] = {}  # by the first rank of several that hold a copy, how much they write
    for name in _in_order(tensors, aliases):
        tensor, num_bytes = tensors[name], tensors[name].numel() * tensors[name].itemsize
        if gathered or name in only_rank_0:
            writers[name] = [0]
        elif is_dtensor(tensor):
            ranks = tensor.device_mesh.mesh
            copies = ranks.reshape(-1, ranks.shape[-1] if is_sharded(tensor) else 1).tolist()
            least = min(copies if alike else copies[:1], key=lambda copy: sharded.get(copy[0], 0))
            sharded[least[0]] = sharded.get(least[0], 0) + num_bytes // len(least)
            writers[name] = least
        else:
            written, rank = plain[0]
            heapq.heapreplace(plain, (written + num_bytes, rank))
            writers[name] = [rank]
    return Plan(world_size, gathered, writers, aliases)


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
