"""The tensor files of a checkpoint, each written by one rank."""

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint.hashing import FileDigest
from trainer.checkpoint.layout import Plan, key_of, num_rows
from trainer.checkpoint.safetensors_files import ToStore, write_file
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.local_shard import to_local


def write_tensors(
    directory: Path, tensors: Mapping[str, Tensor], plan: Plan, rank: int, group: torch_dist.ProcessGroup
) -> dict[str, FileDigest]:
    """Write what `plan` gives to this rank, hashed on the way and fsynced; returns the files' digests.

    Collective over `group`, on which CPU tensors travel, where rank 0 writes all. What is sharded, or on a
    GPU, then comes as the file grows, so that rank 0 holds its own part of the state and one piece more.
    Other ranks send, whatever happens to the file there.
    """
    coming = {name: _pieces(tensors[name], plan, group) for name in plan.writers if name in tensors}
    files: dict[str, list[ToStore]] = {}
    for name, pieces in coming.items():
        tensor = tensors[name]
        shape = tuple(tensor.shape if plan.gathered else to_local(tensor).shape)
        if rank in plan.writers[name] and (num_rows(shape) or rank == plan.writers[name][0]):
            stored = ToStore(key_of(name), tensor.dtype, shape, pieces)
            files.setdefault(plan.file_of(name, rank), []).append(stored)
    try:
        return {name: write_file(directory / name, stored) for name, stored in files.items()}
    finally:
        if plan.gathered:
            for pieces in coming.values():
                collections.deque(pieces, maxlen=0)


def _pieces(tensor: Tensor, plan: Plan, group: torch_dist.ProcessGroup) -> Iterator[Tensor]:
    if plan.gathered:
        return gather_shards_to_rank0(tensor, "cpu", group)
    return (part.cpu() for part in (to_local(tensor),))
