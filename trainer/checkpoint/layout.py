"""Which rank writes which part of a save, and the index of where each tensor is."""

import heapq
import json
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.safetensors_files import NAMES
from trainer.checkpoint.tree import is_extra_state
from trainer.tensors.local_shard import is_dtensor, is_sharded, num_rows, rows_of_shard, to_local

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

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Of tensors, by their names in a checkpoint."""


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
    chunks: Sequence[Chunk]

    def overlapping(self, begin: int, end: int) -> Iterator[Chunk]:
        """The chunks that hold any of the rows [begin, end)."""
        first = max(0, bisect_right(self.chunks, begin, key=attrgetter("begin")) - 1)
        for number in range(first, len(self.chunks)):
            chunk = self.chunks[number]
            if chunk.begin >= end:
                return
            if begin < chunk.begin + num_rows(chunk.shape):
                yield chunk


Index = Mapping[str, IndexEntry]
"""By the name of a tensor in the state."""


class WrittenChunks(Sequence[Chunk]):
    """The chunks of a tensor that each of ``writers`` wrote a shard of, made as they are asked for.

    Args:
        name: of the tensor.
        num_writers: all ranks that wrote files.
    """

    def __init__(self, name: str, shape: tuple[int, ...], writers: Sequence[int], num_writers: int) -> None:
        self._name, self._shape, self._writers, self._num_writers = name, shape, writers, num_writers
        rows = num_rows(shape)
        each = rows_of_shard(rows, 0, len(writers))[1]
        self._len = max(1, -(-rows // max(1, each)))  # the last writers may have had no rows

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, part: Any) -> Any:
        if not 0 <= part < self._len:
            raise IndexError(part)
        begin, end = rows_of_shard(num_rows(self._shape), part, len(self._writers))
        sizes = (end - begin, *self._shape[1:]) if self._shape else ()
        file = file_of(self._name, self._writers[part], self._num_writers)
        return Chunk(file, key_of(self._name), begin, sizes)


def index_from_json(written: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """The index, whose JSON is `Plan.index`."""
    groups, num_writers = written["groups"], written["num_writers"]
    index = {}
    for name, (dtype, shape, group, written_as) in written["tensors"].items():
        chunks = WrittenChunks(written_as or name, tuple(shape), groups[group], num_writers)
        index[name] = IndexEntry(DTYPES[dtype], torch.Size(shape), chunks)
    return index


def index_of_version_4(tensors: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """The index of a checkpoint that was written before Ringmaster 0.2, which lists each chunk."""
    return {
        name: IndexEntry(
            DTYPES[entry["dtype"]],
            torch.Size(entry["shape"]),
            tuple(Chunk(**{**chunk, "shape": tuple(chunk["shape"])}) for chunk in entry["chunks"]),
        )
        for name, entry in tensors.items()
    }


@dataclass(frozen=True)
class Plan:
    """Which rank writes which part of a save.

    The next save mostly has the same tensors, and takes it over: to make one for the 40,000 tensors of 10,000
    parameters takes as long as the rest of a save.

    Attributes:
        format: "full" or "sharded", for the manifest.
        writers: by the name of a tensor, the ranks that write it, in the order of its rows; names are in the
            order of writing.
        aliases: names of tensors that are other names of those in ``writers``, such as tied weights; they are
            written once.
        index: where each tensor will be, as state.json has it; of rank 0's plan.
    """

    format: str
    num_writers: int
    writers: dict[str, list[int]]
    aliases: dict[str, str]
    index: str = ""

    def part_of(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """The ``tensors`` of which ``rank`` writes all or a shard, in the order of writing."""
        return {name: tensors[name] for name, ranks in self.writers.items() if rank in ranks}

    def file_of(self, name: str, rank: int) -> str:
        """The file to which ``rank`` writes a tensor."""
        return file_of(name, rank, self.num_writers)

    def indexed(self, tensors: Mapping[str, Tensor]) -> "Plan":
        """This plan with its ``index``: dtype and shape of each tensor, and the number of a group of ranks.

        Where its rows are follows from these, so that the size doesn't grow with tensors times ranks.
        """
        different = dict.fromkeys(map(tuple, self.writers.values()))
        groups = {writers: number for number, writers in enumerate(different)}
        entries = {
            name: (
                str(tensors[name].dtype).removeprefix("torch."),
                tuple(tensors[name].shape),
                groups[tuple(self.writers[first])],
                first if first != name else None,
            )
            for name, first in (dict(zip(self.writers, self.writers, strict=True)) | self.aliases).items()
        }
        written = {"num_writers": self.num_writers, "groups": list(groups), "tensors": entries}
        return replace(self, index=json.dumps(written))


def file_of(name: str, rank: int, num_writers: int) -> str:
    """The file to which ``rank`` writes a tensor; weights have files of their own, for other programs."""
    kind = "model" if _is_weight(name) else "optim"
    return f"{kind}-{rank:05d}-of-{num_writers:05d}.safetensors"


def _is_weight(name: str) -> bool:
    """Whether a tensor of the state is one of the model's state dict, without the extra state of modules."""
    return name.startswith(_MODEL) and not is_extra_state(name)


def key_of(name: str) -> str:
    """The name of a tensor in its file: weights have their plain names there."""
    return name.removeprefix(_MODEL) if _is_weight(name) else name


def plan_save(
    tensors: Mapping[str, Tensor],
    format: str,
    rank: int,
    world_size: int,
    written_by: Mapping[str, int] | None = None,
    alike: bool = True,
) -> Plan:
    """Decide which rank writes which of the live ``tensors``: each rank decides the same of its own.

    Args:
        format: "full": rank 0, which has all of each tensor, writes all. "sharded": each rank writes its
            shards; of several ranks that hold a tensor, the one with the least to write.
        written_by: by the names of some tensors, the rank that writes them in any case.
        alike: whether all ranks have tensors of the same names and sizes, except for ``written_by``. If not,
            rank 0 writes all that are not sharded.
    """
    aliases = aliases_in(tensors)
    writers: dict[str, list[int]] = {}
    num_writers = world_size if format == "sharded" else 1
    plan = Plan(format, num_writers, writers, aliases)
    plain = [(0, rank) for rank in range(num_writers if alike else 1)]  # a heap
    sharded: dict[int, int] = {}  # by the first rank of several that hold a copy, how much they write
    for name in _in_order(tensors, aliases):
        tensor, num_bytes = tensors[name], tensors[name].numel() * tensors[name].itemsize
        if written_by and name in written_by:
            writers[name] = [written_by[name]]
        elif is_dtensor(tensor):
            ranks = tensor.device_mesh.mesh
            copies = ranks.reshape(-1, ranks.shape[-1] if is_sharded(tensor) else 1).tolist()
            least = min(copies if alike else copies[:1], key=lambda copy: sharded.get(copy[0], 0))
            sharded[least[0]] = sharded.get(least[0], 0) + num_bytes // len(least)
            writers[name] = least
        else:
            written, of = plain[0]
            heapq.heapreplace(plain, (written + num_bytes, of))
            writers[name] = [of]
    return plan.indexed(tensors) if rank == 0 else plan


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
