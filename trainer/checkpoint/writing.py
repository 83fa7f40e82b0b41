"""The tensor files of a checkpoint, each written by one rank."""

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint.hashing import FileDigest
from trainer.checkpoint.layout import Plan, key_of
from trainer.checkpoint.safetensors_files import ToStore, write_file
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.local_shard import num_rows, to_local


def write_tensors(
    directory: Path, tensors: Mapping[str, Tensor], plan: Plan, rank: int, group: torch_dist.ProcessGroup
) -> dict[str, FileDigest]:
    """Write this rank's part of `plan`, hashed on the way and fsynced; return the digests by file.

    If rank 0 writes all, this is a collective over `group`, which sends CPU tensors. Shards and GPU tensors
    then arrive while the file is written, so that rank 0 holds only its own part of the state and one shard
    more. Other ranks send even if writing fails on rank 0.

    Args:
        tensors: those of `plan.part_of` this rank, by their names in the checkpoint.

    Raises:
        OSError: of the disk.
    """
    coming = {name: _chunks(tensors[name], plan, group) for name in plan.writers if name in tensors}
    files: dict[str, list[ToStore]] = {}
    for name, chunks in coming.items():
        tensor = tensors[name]
        shape = tuple(tensor.shape if plan.gathered else to_local(tensor).shape)
        if rank in plan.writers[name] and (num_rows(shape) or rank == plan.writers[name][0]):
            stored = ToStore(key_of(name), tensor.dtype, shape, chunks)
            files.setdefault(plan.file_of(name, rank), []).append(stored)
    try:
        return {name: write_file(directory / name, stored) for name, stored in files.items()}
    finally:
        if plan.gathered:
            for chunks in coming.values():
                collections.deque(chunks, maxlen=0)  # take part in the collectives that are left


def _chunks(tensor: Tensor, plan: Plan, group: torch_dist.ProcessGroup) -> Iterator[Tensor]:
    """The rows of `tensor` that arrive here, on the CPU, chunk by chunk; nothing happens before the first."""
    if plan.gathered:
        return gather_shards_to_rank0(tensor, "cpu", group)
    return (part.cpu() for part in (to_local(tensor),))
