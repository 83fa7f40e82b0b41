"""The ``sharded`` format: every rank writes its own part, in the layout of torch.distributed.checkpoint."""

import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from trainer.checkpoint.hashing import FileDigest, HashingFile, without_crc32
from trainer.checkpoint.matching import Shapes
from trainer.errors import UserError

METADATA = ".metadata"

# All that the metadata of tensors is made of. torch pickles it, so these and no others may be looked up.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata of tensors needs")


class _HashingFileSystem(FileSystem):
    """Remembers the digest of each file it wrote."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with HashingFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.digests[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _HashingWriter(dcp.FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=False, overwrite=False)  # HashingFile fsyncs
        self.fs: _HashingFileSystem = _HashingFileSystem()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # the path is that of a temporary, and a class more to allow


class _SafeReader(dcp.FileSystemReader):
    """torch's reader, but for the metadata, which torch would unpickle without a question."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def write(
    directory: Path, tensors: Mapping[str, Tensor], group: torch_dist.ProcessGroup
) -> dict[str, FileDigest]:
    """Write this rank's part of ``tensors``; collective over ``group``. When one rank fails, all raise.

    Returns the digests of the files that this rank wrote. What several ranks hold is written by one of them.
    """
    writer = _HashingWriter(directory)
    try:
        with without_crc32():
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:  # a BaseException, which nobody expects
        raise _first_failure(error) from error
    return writer.fs.digests


def write_streaming(
    directory: Path, shapes: Shapes, read: Callable[[dict[str, Tensor]], None], max_bytes: int
) -> dict[str, FileDigest]:
    """Write tensors of ``shapes``, no more than ``max_bytes`` (or one tensor) of them in memory.

    ``read`` fills the tensors it is given by their names. As if each portion were written by a rank of its
    own, so that torch's planner and writer do the rest; needs no process group.
    """
    portions = _portions(shapes, max_bytes)
    planned = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in shapes.items()}
    writer, planner = _HashingWriter(directory), dcp.DefaultSavePlanner()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(planned, writer.storage_meta(), is_coordinator=True)
    items = {item.index.fqn: item for item in planner.create_local_plan().items}
    plans = [
        SavePlan([items[name] for name in names], planner_data={name: (name,) for name in names})
        for names in portions
    ]
    plans, metadata = planner.create_global_plan(plans)
    results = []
    for names, plan in zip(portions, writer.prepare_global_plan(plans), strict=True):
        planner.state_dict = {name: torch.empty(shapes[name][0], dtype=shapes[name][1]) for name in names}
        read(planner.state_dict)
        with without_crc32():
            results.append(writer.write_data(plan, planner).wait())
    writer.finish(metadata, results)
    return writer.fs.digests


def _portions(shapes: Shapes, max_bytes: int) -> list[list[str]]:
    portions: list[list[str]] = [[]]
    num_bytes = 0
    for name, (shape, dtype) in shapes.items():
        size = shape.numel() * dtype.itemsize
        if portions[-1] and num_bytes + size > max_bytes:
            portions.append([])
            num_bytes = 0
        portions[-1].append(name)
        num_bytes += size
    return portions


def read_into(
    directory: Path, metadata: Metadata, targets: dict[str, Tensor], group: torch_dist.ProcessGroup | None
) -> None:
    """Fill ``targets`` (whole or sharded, in any layout); collective over ``group``, None reads alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # group=None says so
            dcp.load(
                cast(dict[str, Any], targets),
                storage_reader=_SafeReader(directory, metadata),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as error:
        raise _first_failure(error) from error


def read_metadata(directory: Path) -> Metadata:
    """What the shards in ``directory`` hold; a pickle that asks for anything else is refused, and not run."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a broken pickle raises whatever its bytes happen to ask for
        raise UserError(f"{path} is no metadata of tensors: {error}") from error
    if not isinstance(metadata, Metadata) or not all(
        isinstance(value, TensorStorageMetadata) for value in metadata.state_dict_metadata.values()
    ):
        raise UserError(f"{path} is no metadata of tensors")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise UserError(
                f"{path} names the file {info.relative_path!r}: only plain file names beside it are allowed"
            )
    return metadata


def shapes_of(metadata: Metadata) -> Shapes:
    return {
        name: (value.size, value.properties.dtype)
        for name, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def _first_failure(error: dcp.CheckpointException) -> Exception:
    rank, (failure, _) = min(error.failures.items())
    return OSError(f"rank {rank}: {failure}")
