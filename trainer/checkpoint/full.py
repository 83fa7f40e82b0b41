"""The ``full`` format: rank 0 writes one file of whole tensors, named as in the plain module."""

from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.checkpoint.hashing import FileDigest, HashingFile, without_crc32
from trainer.errors import UserError

TENSORS = "tensors.pt"


def gather(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Whole tensors on rank 0, nothing on the others; collective, with the same names in the same order.

    A sharded tensor is made whole and moved to the CPU, one at a time, so that no device holds more than one.
    Any other stays what it is: the live tensor.
    """
    whole = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            # CPU offload leaves shards where the mesh's backend does not reach.
            tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
            tensor = tensor.cpu() if rank == 0 else tensor
        if rank == 0:
            whole[name] = tensor
    return whole


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """``torch.save`` the flat dict of ``tensors`` as CPU tensors, hashed on the way and fsynced."""
    with HashingFile(path) as file, without_crc32():
        torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, cast(IO[bytes], file))
    return file.digest


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
