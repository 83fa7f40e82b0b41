"""Numbers that a process shows to the others of its host, in its heartbeat's memory: COUNT in each turn.

There are two slots. Each has a checksum, since not every processor makes its stores visible in order: what
does not match is not yet whole.
"""

import mmap
import struct
import zlib
from collections.abc import Sequence

COUNT = 5
_SLOT = struct.Struct(f"=q{COUNT}d")  # turn, numbers
_CHECKSUM_BYTES, _SLOT_BYTES = 4, 64
SIZE = 2 * _SLOT_BYTES


def write(memory: mmap.mmap, begin: int, turn: int, numbers: Sequence[float]) -> None:
    """Show COUNT numbers until turn + 2."""
    packed, at = _SLOT.pack(turn, *numbers), begin + turn % 2 * _SLOT_BYTES
    memory[at : at + _SLOT.size + _CHECKSUM_BYTES] = packed + _checksum(packed)


def read(memory: mmap.mmap, begin: int, turn: int) -> tuple[float, ...] | None:
    """The numbers of `turn`; None if it is still to come."""
    at = begin + turn % 2 * _SLOT_BYTES
    whole = memory[at : at + _SLOT.size + _CHECKSUM_BYTES]
    packed = whole[: _SLOT.size]
    shown, *numbers = _SLOT.unpack(packed)
    return tuple(numbers) if shown == turn and whole[_SLOT.size :] == _checksum(packed) else None


def _checksum(packed: bytes) -> bytes:
    return zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "little")
