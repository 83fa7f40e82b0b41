"""The ``sharded`` format: every rank writes its own part, in the layout of torch.distributed.checkpoint."""

import io
import math
import operator
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future

from trainer.checkpoint.archive import check_pickle, load_one
from trainer.checkpoint.hashing import FileDigest, HashingFile, without_crc32
from trainer.checkpoint.matching import Shapes
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.store import Manifest, open_listed
from trainer.errors import UserError
from trainer.files.untrusted import printable, reason

METADATA = ".metadata"
_METADATA_BYTES = 1 << 24  # that much is read however little the shards hold

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


class _ShardReader(dcp.StorageReader):
    """Reads through the one door what torch's reader would read without a question."""

    def __init__(self, shards: "ShardedCheckpoint") -> None:
        self._shards = shards

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._shards.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The metadata is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._shards.file_of(item.storage_index), []).append(item)
        for name, items in by_file.items():
            with self._shards.open_file(name) as file:
                for item in items:
                    tensor = self._shards.read_chunk(file, item.storage_index)
                    for dim, (begin, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        tensor = tensor.narrow(dim, begin, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclass(frozen=True)
class ShardedCheckpoint:
    """What ``open`` found in a directory of this format.

    Attributes:
        chunk_sizes: the size of each chunk, by the tensor and the place in it where it begins.
    """

    directory: Path
    manifest: Manifest
    metadata: Metadata
    chunk_sizes: Mapping[MetadataIndex, tuple[int, ...]]
    shapes: Shapes

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> "ShardedCheckpoint":
        """Read the metadata; a pickle that asks for anything else is refused, and not run.

        Raises:
            UserError: no such pickle; it names files that the manifest does not, or more bytes than they
                have; or a tensor of which some part is nowhere, or twice.
        """
        path = printable(directory / METADATA)
        with open_listed(directory, manifest, METADATA) as file:
            data = file.read(max(_METADATA_BYTES, manifest.num_bytes // 2))
        try:
            check_pickle(data, manifest.num_bytes)
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise UserError(f"it is a {type(metadata).__name__}")
            _check_places(metadata, {name: file.bytes for name, file in manifest.files.items()})
            return cls(directory, manifest, metadata, _check_tensors(metadata), _shapes_of(metadata))
        except UserError as error:
            raise UserError(f"{path} is no metadata of tensors: {error}") from error
        except Exception as error:  # a broken pickle raises whatever its bytes happen to ask for
            raise UserError(f"{path} is no metadata of tensors: {reason(error)}") from error

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Whole tensors, read into new memory by this process alone."""
        tensors = {name: torch.empty(self.shapes[name][0], dtype=self.shapes[name][1]) for name in names}
        self.read_into(tensors, None)
        return tensors

    def read_into(self, targets: dict[str, Tensor], group: torch_dist.ProcessGroup | None) -> None:
        """Fill ``targets`` (whole or sharded, in any layout); collective over ``group``, None reads alone."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # None says so
                dcp.load(
                    cast(dict[str, Any], targets),
                    storage_reader=_ShardReader(self),
                    process_group=group,
                    no_dist=group is None,
                )
        except dcp.CheckpointException as error:
            raise _first_failure(error) from error

    def parts(self, part: int, parts: int) -> Iterator[tuple[str, Tensor]]:
        """The chunks in every ``parts``-th shard, from ``part`` on, by the names of what they are of.

        Raises:
            UserError: one is not what it should be.
        """
        by_file: dict[str, list[MetadataIndex]] = {}
        for index in self.chunk_sizes:
            by_file.setdefault(self.file_of(index), []).append(index)
        for name in sorted(by_file)[part::parts]:
            with self.open_file(name) as file:
                for index in by_file[name]:
                    yield index.fqn, self.read_chunk(file, index)

    def file_of(self, index: MetadataIndex) -> str:
        return self.metadata.storage_data[index].relative_path

    def open_file(self, name: str) -> PlainFile:
        return open_listed(self.directory, self.manifest, name)

    def read_chunk(self, file: PlainFile, index: MetadataIndex) -> Tensor:
        place, shape = self.metadata.storage_data[index], self.chunk_sizes[index]
        dtype = self.shapes[index.fqn][1]
        tensor = load_one(file.part(place.offset, place.length))
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise UserError(
                f"{printable(file.path)} holds a part of {printable(index.fqn)} as {list(tensor.shape)} "
                f"{tensor.dtype}; the metadata says {list(shape)} {dtype}"
            )
        return tensor


def _check_places(metadata: Metadata, file_bytes: Mapping[str, int]) -> None:
    """UserError unless each chunk lies in a file of the manifest, and no two in the same place."""
    left = dict(file_bytes)
    for index, place in metadata.storage_data.items():
        name = place.relative_path
        if name not in left:
            raise UserError(f"it names the file {printable(name)}: only those of the manifest are allowed")
        begin, length = _whole_numbers((place.offset, place.length))
        left[name] -= length
        if begin + length > file_bytes[name] or left[name] < 0:
            raise UserError(f"it claims more of {printable(name)} than there is")
        if place.transform_descriptors:
            raise UserError(f"{printable(index.fqn)} is packed in a way that no save of ours makes")


def _check_tensors(metadata: Metadata) -> dict[MetadataIndex, tuple[int, ...]]:
    """The size of each chunk. UserError unless all of each tensor is there, in the bytes that it needs."""
    chunk_sizes: dict[MetadataIndex, tuple[int, ...]] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
            raise UserError(f"{printable(name)} is no tensor")
        dtype, size = tensor.properties.dtype, _whole_numbers(tensor.size)
        if not isinstance(dtype, torch.dtype) or not isinstance(tensor.size, torch.Size):
            raise UserError(f"{printable(name)} has no size or dtype")
        boxes = []
        for chunk in tensor.chunks:
            begin, extent = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
            index = MetadataIndex(name, torch.Size(begin))
            chunk_sizes[index] = extent
            held = metadata.storage_data[index].length
            if math.prod(extent) * dtype.itemsize > held:
                raise UserError(f"it claims {list(extent)} numbers of {printable(name)} in {held} bytes")
            boxes.append((begin, tuple(map(operator.add, begin, extent))))
        if not covers(boxes, (0,) * len(size), size):
            raise UserError(f"some part of {printable(name)} is in none of its chunks, or in several")
    if len(chunk_sizes) != len(metadata.storage_data):
        raise UserError("it knows where chunks are that belong to no tensor")
    return chunk_sizes


def _shapes_of(metadata: Metadata) -> Shapes:
    return {
        name: (value.size, value.properties.dtype)
        for name, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def _whole_numbers(size: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(size)
    sound = len(numbers) <= 64 and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    if not sound or math.prod(numbers) >= 1 << 62:
        raise UserError("it holds a size or place that is none")
    return numbers


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins and where it ends, in each dimension


def covers(boxes: list[_Box], begin: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Whether the boxes fill the one from ``begin`` to ``end`` without gap or overlap, slice by slice.

    That is how DTensor cuts: along one dimension, each piece along another, and so on. Other ways to fill a
    box (a pinwheel) are taken for a gap.
    """
    if any(low == high for low, high in zip(begin, end, strict=True)):
        return True
    boxes = [box for box in boxes if all(low < high for low, high in zip(*box, strict=True))]
    todo = [(boxes, begin, end)]
    for _ in range(2 * len(begin) + 1):
        rest = []
        for piece in todo:
            if piece[0] != [piece[1:]]:
                cuts = (_slices(*piece, dim) for dim in range(len(begin)))
                slices = next((slices for slices in cuts if len(slices) > 1), None)
                if slices is None:
                    return False
                rest += slices
        todo = rest
    return not todo


def _slices(
    boxes: list[_Box], begin: tuple[int, ...], end: tuple[int, ...], dim: int
) -> list[tuple[list[_Box], tuple[int, ...], tuple[int, ...]]]:
    """The boxes in slices along ``dim`` that no box crosses; none if a slice is missing."""
    slices: list[tuple[list[_Box], tuple[int, ...], tuple[int, ...]]] = []
    reach, members = begin[dim], list[_Box]()
    for box in [*sorted(boxes, key=lambda box: box[0][dim]), (end, end)]:
        if members and box[0][dim] >= reach:
            low = members[0][0][dim]
            slices.append((members, _with(begin, dim, low), _with(end, dim, reach)))
            members = []
        if not members and box[0][dim] != reach:
            return []
        members.append(box)
        reach = max(reach, box[1][dim])
    return slices if reach == end[dim] else []


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def _first_failure(error: dcp.CheckpointException) -> Exception:
    rank, (failure, _) = min(error.failures.items())
    return OSError(f"rank {rank}: {failure}")
