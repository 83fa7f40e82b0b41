"""Files of ``torch.save``, read without trusting them.

``torch.load(weights_only=True)`` runs no code from a file. It does take the file's word for how much memory
it needs: a record that inflates a thousandfold, a tensor of 10^9 elements that are all the same one, a
``bytearray`` of any size, nesting that overflows the stack of C when it is hashed. So the container and the
pickle within are looked through first, and the tensors that come out are compared with what the file holds.
"""

import functools
import pickletools
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.reading import FilePart, PlainFile
from trainer.errors import UserError
from trainer.files.untrusted import printable, reason

# What torch.save asks for when it writes a dict of plain tensors: v3 for dtypes that have no storage of their
# own, as float8 and uint16.
_OF_PLAIN_TENSORS = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
    "collections OrderedDict",
}
# What weights_only allows, but takes as much memory as it is told to.
_REFUSED_ALWAYS = {"builtins bytearray", "__builtin__ bytearray"}

_MAX_EXPANDED_BYTES = 1 << 26
_MAX_DIRECTORY_BYTES = 1 << 26
_MIN_MAX_OPCODES = 1 << 18  # each may make 72 bytes of memory, an empty dict; a set counts fourfold
_BYTES_PER_OPCODE = 8  # what the files hold for each opcode beyond those; a tensor takes some 30
_MAX_PICKLE_DEPTH = 100
_IN_PLACE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}

_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_ENTRY, _LOCAL = b"PK\1\2", b"PK\3\4"
_AS_IN_64 = 0xFFFFFFFF


def load_named(file: PlainFile, ours: bool) -> Any:
    """What ``torch.save`` put into ``file``, mapped from it and read when touched.

    ``ours`` allows what we write and no more: plain tensors in plain dicts.

    Raises:
        UserError: no such file; damaged; or it claims more than it holds.
    """
    part = file.part(0, file.size)
    return _load(part, ours, file.descriptor_path, mmap=True)


def load_one(part: FilePart) -> Tensor:
    """The one plain tensor that ``torch.save`` put into ``part``, read at once."""
    tensor = _load(part, True, part)
    if not isinstance(tensor, Tensor):
        raise UserError(f"{printable(part.file.path)} holds a {type(tensor).__name__} in place of a tensor")
    check_tensors({"a part of it": tensor}, part)
    return tensor


def _load(part: FilePart, ours: bool, source: Any, **options: Any) -> Any:
    where = printable(part.file.path)
    try:
        _check_container(part, ours)
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except UserError as error:
        raise UserError(f"{where} is no file of plain tensors: {error}") from error
    except Exception as error:  # torch raises whatever its zip reader and unpickler stumble over
        raise UserError(f"{where} is no file of plain tensors: {reason(error)}") from error


def check_tensors(tensors: Mapping[str, Tensor], part: FilePart) -> None:
    """UserError unless all are dense, lie in memory, and need no more of it than ``part`` has bytes.

    Names that share one tensor (tied weights) count once.
    """
    storages, views = {}, {}
    for name, tensor in tensors.items():
        problem = unusual(tensor)
        if problem is None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            num_bytes = tensor.numel() * tensor.element_size()
            views[storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()] = num_bytes
        if problem is not None:
            raise UserError(f"{printable(part.file.path)}: {printable(name)} {problem}")
    # A buffer may be a slice of another, or one number expanded: rare, and small.
    if sum(storages.values()) > part.length or sum(views.values()) > 4 * part.length + _MAX_EXPANDED_BYTES:
        raise UserError(f"{printable(part.file.path)} claims tensors of more bytes than its {part.length:,}")


def unusual(tensor: Tensor) -> str | None:
    """Why a checkpoint cannot hold ``tensor``, in words; None where it can."""
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); save it dense, with to_dense()"
    if tensor.is_meta:
        return "is on the meta device: it was saved without its numbers"
    if tensor.is_nested or tensor.is_quantized:
        return "is nested or quantized, and no plain tensor"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}, and no plain tensor"
    return None


def _check_container(part: FilePart, ours: bool) -> None:
    """UserError unless ``part`` is a zip archive as torch.save makes them: nothing packed, nothing twice."""
    records = _records(part)
    pickles = {name: place for name, place in records.items() if name.endswith("/data.pkl")}
    if len(pickles) != 1:
        raise UserError("it has no data.pkl, or several")
    ((name, (offset, size)),) = pickles.items()
    byteorder = records.get(name.removesuffix("data.pkl") + "byteorder")
    if byteorder is not None and _data(part, *byteorder) != sys.byteorder.encode():
        raise UserError("it was written on a machine of another byte order")
    data = _data(part, offset, size)
    asked_for = (_asked_for if len(data) < 4096 else check_pickle)(data, part.length)
    refused = asked_for & _REFUSED_ALWAYS
    if ours:
        refused |= {found for found in asked_for - _OF_PLAIN_TENSORS if not _is_a_dtype(found)}
    if refused:
        raise UserError(
            f"it asks for {printable(min(refused).replace(' ', '.'))}, which no plain tensor needs"
        )


def _is_a_dtype(asked_for: str) -> bool:
    """Whether it is one, or the storage that stands for one."""
    module, _, name = asked_for.partition(" ")
    return module == "torch" and (
        name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
    )


@functools.lru_cache(maxsize=256)
def _asked_for(data: bytes, held_bytes: int) -> set[str]:
    """`check_pickle`, once for the thousands of tensors of one shape in a sharded checkpoint."""
    return check_pickle(data, held_bytes)


def _records(part: FilePart) -> dict[str, tuple[int, int]]:
    """The position (of its header) and the size of each record in a zip archive, whole and unpacked.

    As strict as the archives of torch.save are plain: what two readers could understand in two ways is
    refused.
    """
    if part.length < 26 or part.read_at(0, 4) != _LOCAL:
        raise UserError("it does not begin as torch.save's files do (before torch 1.6 they were others)")
    end = part.length - 22
    magic, count, size, begin, comment = struct.unpack("<4s6xH2IH", part.read_at(end, 22))
    if magic != _END or comment:
        raise UserError("it does not end as an archive ends: it was cut off, or more was added")
    if end >= 76 and part.read_at(end - 20, 4) == _LOCATOR64:
        end -= 76
        (said,) = struct.unpack("<64xQ4x", part.read_at(end, 76))
        magic, *wide = struct.unpack("<4s28xQQQ20x", part.read_at(end, 76))
        narrow = ((count, 0xFFFF), (size, _AS_IN_64), (begin, _AS_IN_64))
        agree = all(short in (long, most) for (short, most), long in zip(narrow, wide, strict=True))
        if magic != _END64 or said != end or not agree:
            raise UserError("the directory of its archive is damaged")
        count, size, begin = wide
    if begin + size != end or size > _MAX_DIRECTORY_BYTES or count * 46 > size:
        raise UserError("the directory of its archive is damaged")
    records = _directory(part.read_at(begin, size), begin)
    if len(records) != count or sum(length for _, length in records.values()) > begin:
        raise UserError("the directory of its archive names records twice, or more than there is")
    return records


def _directory(data: bytes, end: int) -> dict[str, tuple[int, int]]:
    records, folded, position = {}, set(), 0
    while position < len(data):
        if len(data) - position < 46:
            raise UserError("the directory of its archive is damaged")
        fields = struct.unpack_from("<4s6H3I5H2I", data, position)
        magic, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, header = fields[10], fields[11], fields[12], fields[16]
        name = data[position + 46 : position + 46 + name_size].decode(errors="replace")
        extra = data[position + 46 + name_size : position + 46 + name_size + extra_size]
        packed, size, header = _in_64_bits(extra, packed, size, header)
        position += 46 + name_size + extra_size + comment_size
        if magic != _ENTRY or position > len(data) or header + size > end:
            raise UserError("the directory of its archive is damaged")
        if method != 0 or flags & 1 or packed != size:
            raise UserError(f"its record {printable(name)} is compressed, which torch.save never does")
        if name.lower() in folded:  # torch's reader takes no notice of case
            raise UserError(f"its record {printable(name)} is there twice")
        folded.add(name.lower())
        records[name] = (header, size)
    return records


def _in_64_bits(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """Sizes and position that did not fit into 32 bits stand in the extra field 1, unpacked size first."""
    numbers = [size, packed, header]
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = extra[4 : 4 + length]
            for index, number in enumerate(numbers):
                if number == _AS_IN_64 and len(wide) >= 8:
                    numbers[index], wide = struct.unpack_from("<Q", wide)[0], wide[8:]
            break
        extra = extra[4 + length :]
    return numbers[1], numbers[0], numbers[2]


def _data(part: FilePart, header: int, size: int) -> bytes:
    magic, name_size, extra_size = struct.unpack("<4s22x2H", part.read_at(header, 30))
    if magic != _LOCAL:
        raise UserError("a record of its archive is damaged")
    return part.read_at(header + 30 + name_size + extra_size, size)


def check_pickle(data: bytes, held_bytes: int) -> set[str]:
    """What the pickle in ``data`` asks for by GLOBAL ("module name"), found without doing any of it.

    Raises:
        UserError: it is cut off; deeply nested; or longer, or with a larger memo, than ``held_bytes`` of
            files could need.
    """
    stack: list[int | None] = []  # how deep each object is nested; None is a mark
    memo: dict[int, int] = {}
    asked_for: set[str] = set()
    count, max_opcodes = 0, _MIN_MAX_OPCODES + held_bytes // _BYTES_PER_OPCODE
    try:
        opcode: pickletools.OpcodeInfo
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            count += 4 if name == "EMPTY_SET" else 1
            if count > max_opcodes:
                raise UserError(f"its pickle has more than {max_opcodes:,} operations")
            if name == "MEMOIZE" or name in _PUT:
                index = len(memo) if name == "MEMOIZE" else argument
                if not 0 <= index <= len(memo):  # the unpickler of C makes room for all below
                    raise UserError(f"its pickle puts object {index} after {len(memo)}")
                memo[index] = stack[-1] or 0
                continue
            if name in _GET:
                stack.append(memo[argument])
                continue
            if name == "GLOBAL":
                asked_for.add(argument)
            _step(stack, opcode)
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises whatever its bytes happen to ask for
        raise UserError(f"its pickle is damaged ({reason(error)})") from error
    return asked_for


def _step(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> None:
    """What ``opcode`` does to the depths on the ``stack``."""
    before, taken = opcode.stack_before, []
    count = len(before)
    if pickletools.markobject in before:
        while (depth := stack.pop()) is not None:
            taken.append(depth)
        count = before.index(pickletools.markobject)
    containers = [stack.pop() or 0 for _ in range(count)]
    if opcode.name == "MARK":
        stack.append(None)
        return
    if opcode.name in _IN_PLACE:
        container = containers.pop()
        depth = max([container, *(1 + inner for inner in (*taken, *containers))])
    else:
        depth = 1 + max((*taken, *containers), default=-1)
    if depth > _MAX_PICKLE_DEPTH:
        raise UserError(f"its pickle is nested more than {_MAX_PICKLE_DEPTH} deep")
    stack.extend([depth] * len(opcode.stack_after))
