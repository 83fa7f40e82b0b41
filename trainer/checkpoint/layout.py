"""The assignment of the parts of a checkpoint to ranks, and the index that locates its tensors."""

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
# safetensors has no names for these dtypes, so tensors of these dtypes are stored as bytes.
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
"""The dtypes that a checkpoint can contain, by their names in its index."""

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""The shape and dtype of tensors, by their names in a checkpoint."""


@dataclass(frozen=True)
class Chunk:
    """The rows of a tensor that start at row ``begin``, stored as the entry ``key`` of ``file``."""

    file: str
    key: str
    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class IndexEntry:
    """A tensor in a checkpoint. Its chunks contain all its rows, in order."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Sequence[Chunk]

    def overlapping(self, begin: int, end: int) -> Iterator[Chunk]:
        """Yield the chunks that contain any of the rows [begin, end)."""
        first = max(0, bisect_right(self.chunks, begin, key=attrgetter("begin")) - 1)
        for number in range(first, len(self.chunks)):
            chunk = self.chunks[number]
            if chunk.begin >= end:
                return
            if begin < chunk.begin + num_rows(chunk.shape):
                yield chunk


Index = Mapping[str, IndexEntry]
"""The entry of each tensor, by its name in the state."""


class WrittenChunks(Sequence[Chunk]):
    """The chunks of the tensor ``name``, which are computed on access.

    Args:
        writers: the ranks that each wrote a shard of the tensor.
        num_writers: the number of ranks that wrote files of the checkpoint.
    """

    def __init__(self, name: str, shape: tuple[int, ...], writers: Sequence[int], num_writers: int) -> None:
        self._name, self._shape, self._writers, self._num_writers = name, shape, writers, num_writers
        rows = num_rows(shape)
        rows_per_shard = rows_of_shard(rows, 0, len(writers))[1]
        self._len = max(1, -(-rows // max(1, rows_per_shard)))  # the last writers may have had no rows

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, part: Any) -> Any:
        if not 0 <= part < self._len:
            raise IndexError(part)
        begin, end = rows_of_shard(num_rows(self._shape), part, len(self._writers))
        sizes = (end - begin, *self._shape[1:]) if self._shape else ()
        file = file_of(self._name, self._writers[part], self._num_writers)
        return Chunk(file, key_of(self._name), begin, sizes)


def index_from_json(saved: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """Return the index that was saved as `Plan.index`."""
    groups, num_writers = saved["groups"], saved["num_writers"]
    index = {}
    for name, (dtype, shape, group, written_as) in saved["tensors"].items():
        chunks = WrittenChunks(written_as or name, tuple(shape), groups[group], num_writers)
        index[name] = IndexEntry(DTYPES[dtype], torch.Size(shape), chunks)
    return index


def index_of_version_4(tensors: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """Return the index of a checkpoint that was written before Ringmaster 0.2 and lists each chunk."""
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
    """The assignment of the parts of a save to the ranks that write them.

    Saves with the same tensors reuse the plan, because planning 40,000 tensors (of 10,000 parameters) takes
    as long as the rest of a save.

    Attributes:
        format: "full" or "sharded".
        num_writers: the number of ranks that write files.
        writers: the ranks that write each tensor, in the order of its rows; tensors are in the order of
            writing.
        aliases: other names of tensors in ``writers``, such as those of tied weights, mapped to the name in
            ``writers``.
        index: the location of each tensor, as JSON for state.json; only in rank 0's plan.
    """

    format: str
    num_writers: int
    writers: dict[str, list[int]]
    aliases: dict[str, str]
    index: str = ""

    def part_of(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return the ``tensors`` that ``rank`` writes, in full or as a shard, in the order of writing."""
        return {name: tensors[name] for name, ranks in self.writers.items() if rank in ranks}

    def file_of(self, name: str, rank: int) -> str:
        return file_of(name, rank, self.num_writers)

    def indexed(self, tensors: Mapping[str, Tensor]) -> "Plan":
        """Return this plan with its ``index``.

        The index contains the dtype, shape and writers of each tensor, which determine the location of its
        rows. So its size doesn't grow with the number of ranks.
        """
        distinct = dict.fromkeys(map(tuple, self.writers.values()))
        groups = {writers: number for number, writers in enumerate(distinct)}
        entries = {
            name: (
                str(tensors[name].dtype).removeprefix("torch."),
                tuple(tensors[name].shape),
                groups[tuple(self.writers[first])],
                first if first != name else None,
            )
            for name, first in (dict(zip(self.writers, self.writers, strict=True)) | self.aliases).items()
        }
        index = {"num_writers": self.num_writers, "groups": list(groups), "tensors": entries}
        return replace(self, index=json.dumps(index))


def file_of(name: str, rank: int, num_writers: int) -> str:
    """Return the name of the file to which ``rank`` writes a tensor."""
    kind = "model" if _is_weight(name) else "optim"
    return f"{kind}-{rank:05d}-of-{num_writers:05d}.safetensors"


def _is_weight(name: str) -> bool:
    """Return whether a tensor is in the model's state dict and is not extra state of a module."""
    return name.startswith(_MODEL) and not is_extra_state(name)


def key_of(name: str) -> str:
    """Return the name of a tensor in its file; the name of a weight is that in the model."""
    return name.removeprefix(_MODEL) if _is_weight(name) else name


def plan_save(
    tensors: Mapping[str, Tensor],
    format: str,
    rank: int,
    world_size: int,
    written_by: Mapping[str, int] | None = None,
    alike: bool = True,
) -> Plan:
    """Decide which rank writes each of ``tensors``; all ranks reach the same decision.

    Args:
        format: "full" if rank 0 has every tensor in full and writes it; "sharded" if each rank writes its
            shards. Each replicated tensor is then written by the rank that has the fewest bytes to write so
            far.
        written_by: the rank that must write a tensor, by the tensor's name.
        alike: whether tensors have the same names and sizes on all ranks, except those in ``written_by``. If
            not, rank 0 writes all tensors that are not sharded.
    """
    aliases = aliases_in(tensors)
    writers: dict[str, list[int]] = {}
    num_writers = world_size if format == "sharded" else 1
    plan = Plan(format, num_writers, writers, aliases)
    bytes_per_rank = [(0, rank) for rank in range(num_writers if alike else 1)]  # a heap, for plain tensors
    bytes_per_copy: dict[int, int] = {}  # of sharded tensors, by the first rank that has a shard of the copy
    for name in _in_order(tensors, aliases):
        tensor, num_bytes = tensors[name], tensors[name].numel() * tensors[name].itemsize
        if written_by and name in written_by:
            writers[name] = [written_by[name]]
        elif is_dtensor(tensor):
            ranks = tensor.device_mesh.mesh
            copies = ranks.reshape(-1, ranks.shape[-1] if is_sharded(tensor) else 1).tolist()
            least = min(copies if alike else copies[:1], key=lambda copy: bytes_per_copy.get(copy[0], 0))
            bytes_per_copy[least[0]] = bytes_per_copy.get(least[0], 0) + num_bytes // len(least)
            writers[name] = least
        else:
            written, writer = bytes_per_rank[0]
            heapq.heapreplace(bytes_per_rank, (written + num_bytes, writer))
            writers[name] = [writer]
    return plan.indexed(tensors) if rank == 0 else plan


def _in_order(tensors: Mapping[str, Tensor], aliases: Collection[str]) -> list[str]:
    """Return the names in the order of writing, by descending element size, which aligns all tensors."""
    order = {name: (not _is_weight(name), -tensor.itemsize, name) for name, tensor in tensors.items()}
    return sorted(tensors.keys() - aliases, key=order.__getitem__)


def aliases_in(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for each tensor that shares all its memory with an earlier tensor, the latter's name."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        local = to_local(tensor)
        if local.numel() and not local.is_meta:
            memory = (local.dtype, local.device, local.data_ptr(), local.stride())
            key = (_is_weight(name), tensor.shape, *memory)
            if first.setdefault(key, name) != name:
                aliases[name] = first[key]
    return aliases
