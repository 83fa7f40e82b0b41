"""The ``full`` format: rank 0 writes one file of whole tensors, named as in the plain module."""

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.archive import check_tensors, load_named
from trainer.checkpoint.hashing import FileDigest, HashingFile, without_crc32
from trainer.checkpoint.matching import Shapes
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.store import Manifest, open_listed
from trainer.distributed.gather_shards import as_bytes, gather_shards_to_rank0
from trainer.errors import UserError
from trainer.files.untrusted import printable
from trainer.local_shard import local_shard

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
    coming = {
        name: gather_shards_to_rank0(tensor, "cpu", group)
        for name, tensor in tensors.items()
        if _is_elsewhere(tensor)
    }
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
            collections.deque(gather_shards_to_rank0(tensor, "cpu", group), maxlen=0)


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


def open_tensors(file: PlainFile) -> dict[str, Tensor]:
    """The tensors of ``file``, mapped from it and read when touched. Never runs code from the file.

    Raises:
        UserError: it is no flat dict of plain tensors, or holds fewer numbers than they claim.
    """
    tensors = load_named(file, ours=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise UserError(f"{printable(file.path)} is no flat dict of named tensors")
    check_tensors(tensors, file.part(0, file.size))
    return tensors


@dataclass(frozen=True)
class TensorFile:
    """What ``open`` found in a directory of this format."""

    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> "TensorFile":
        """Map the tensors; reads none of their numbers. UserError as of ``open_tensors``."""
        with open_listed(directory, manifest, TENSORS) as file:
            return cls(open_tensors(file))

    @property
    def shapes(self) -> Shapes:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Whole tensors, still in the file as far as nobody touches them."""
        return {name: self.tensors[name] for name in names}

    def read_into(self, targets: Mapping[str, Tensor], group: torch_dist.ProcessGroup | None) -> None:
        """Copy each whole tensor into the target of the same name; a sharded target takes its own part."""
        with torch.no_grad():
            for name, target in targets.items():
                if isinstance(target, DTensor):
                    target.to_local().copy_(local_shard(self.tensors[name], target))
                else:
                    target.copy_(self.tensors[name])

    def parts(self, part: int, parts: int) -> Iterator[tuple[str, Tensor]]:
        """This part of so many of the tensors, by name; they were compared with the file when opened."""
        yield from list(self.tensors.items())[part::parts]
