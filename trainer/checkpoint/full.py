"""The ``full`` format: rank 0 writes one file of whole tensors, named as in the plain module."""

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.checkpoint.hashing import FileDigest, HashingFile, without_crc32
from trainer.errors import UserError
from trainer.pieces import as_bytes, pieces

TENSORS = "tensors.pt"


def part_of(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What this rank has to give to the file: rank 0 all it has, others their part of what is sharded."""
    return {name: tensor for name, tensor in tensors.items() if rank == 0 or isinstance(tensor, DTensor)}


def write(
    path: Path, tensors: Mapping[str, Tensor], group: torch_dist.ProcessGroup | None = None
) -> FileDigest:
    """On rank 0: write the file of ``tensors``, hashed on the way and fsynced.

    What is sharded, or on a GPU, comes as the file grows, so that rank 0 holds its own part of the state and
    one piece more. With sharded tensors collective over ``group``, on which CPU tensors travel: all other
    ranks ``send``. They may do so whatever happens to the file here.
    """
    coming = {name: pieces(tensor, "cpu", group) for name, tensor in tensors.items() if _is_elsewhere(tensor)}
    try:
        # torch.save is given memory that nobody touches, and so costs nothing, for what is still to come.
        memory = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype) for name in coming}
        file = _FilledFile(path, {memory[name].data_ptr(): coming[name] for name in coming})
        with file, without_crc32():
            torch.save({**tensors, **memory}, cast(IO[bytes], file))
            assert not file.coming, "torch.save has not written each storage in one call"
    finally:
        for parts in coming.values():
            collections.deque(parts, maxlen=0)
    return file.digest


def send(tensors: Mapping[str, Tensor], group: torch_dist.ProcessGroup) -> None:
    """On every other rank, while rank 0 is in ``write``: give it this rank's part of the sharded tensors."""
    for tensor in tensors.values():
        if _is_elsewhere(tensor):
            collections.deque(pieces(tensor, "cpu", group), maxlen=0)


class _FilledFile(HashingFile):
    """Asked to write the memory at ``address``, it writes ``coming[address]``."""

    def __init__(self, path: Path, coming: Mapping[int, Iterator[Tensor]]) -> None:
        super().__init__(path)
        self.coming = dict(coming)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else None
        if address not in self.coming:
            return super().write(view)
        num_bytes = 0
        for piece in self.coming.pop(address):
            num_bytes += super().write(as_bytes(piece))
        assert num_bytes == len(view)
        return num_bytes


def _is_elsewhere(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (isinstance(tensor, DTensor) or not tensor.is_cpu)


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of ``path``, mapped from the file and read when touched. Never runs code from the file."""
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises whatever its zip reader and unpickler stumble over
        raise UserError(f"{path} is no file of plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise UserError(f"{path} is no flat dict of named tensors")
    return tensors


def copy_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy each whole tensor into the target of the same name; a sharded target takes its own part."""
    with torch.no_grad():
        for name, target in targets.items():
            if isinstance(target, DTensor):
                whole = tensors[name].to(target.device_mesh.device_type)
                # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
                part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(part.to_local())
            else:
                target.copy_(tensors[name])
