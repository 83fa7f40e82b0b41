"""Two copies of files in memory that other processes of this host can read, also when their writer is dead.

The memory is a file without a name. Those that have opened it keep it alive, and it is gone with the last of
them. Each copy has a slot, so one is whole while the other is replaced.

A slot has a head of three words, the step of its copy, and where its text begins and how long it is; then
the files, and the text, JSON. The step is 0 while the copy is not whole.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.safetensors_files import ToStore, header_of
from trainer.errors import UserError

HEAD_BYTES = _ALIGNED = 64
Files = Mapping[str, Sequence[ToStore]]


class CopyMemory:
    """The memory of two equal slots; another process opens it as /proc/PID/fd/FD."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ringmaster-slots")
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.fd)

    def slot(self, number: int) -> Tensor:
        half = len(self.bytes) // 2
        return self.bytes[number * half : (number + 1) * half]

    def make_room(self, size: int) -> None:
        """Let each slot have at least `size` bytes; if that is more than before, the copies there are lost.

        Raises:
            UserError: this host has no memory left for it.
        """
        if 2 * size <= len(self.bytes):
            return
        self.bytes.zero_()  # the second head moves: a reader must not take old bytes for one
        try:
            os.posix_fallocate(self.fd, 0, 2 * size)
        except OSError as error:
            raise UserError(
                f"checkpoint.mirror_every needs {2 * size / 1e9:.3g} GB of this host's memory for the copies "
                f"of each rank, also of those on another host: {error.strerror}; set it to 0, or shard over "
                "more ranks"
            ) from error
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, 2 * size), dtype=torch.uint8)


def head_of(slot: Tensor) -> Tensor:
    """The step of its copy, 0 while that is not whole; where the copy's text begins, and how long it is."""
    return slot[:HEAD_BYTES].view(torch.int64)[:3]


class CopyWriter:
    """Writes the copies of this process into its memory, which nobody else writes.

    Args:
        device: of the tensors. From a GPU they are copied in the order of its stream, the step last.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory, self._device = CopyMemory(), device
        self._layouts: dict[int, _CopyLayout] = {}  # by the number of the slot

    def __del__(self) -> None:
        self._unpin()

    def write(self, number: int, step: int, files: Files, facts: str) -> None:
        """Replace the copy in slot `number`, 0 or 1, by `files`, and by `facts`, JSON; `step` is above 0.

        Raises:
            UserError: this host has no memory left for it.
        """
        layout = self._layouts.get(number)
        if layout is None or not layout.fits(files, facts):
            layout = _CopyLayout(files, facts)
            if 2 * layout.size > len(self.memory.bytes):
                self._grow(layout.size)
            self._layouts[number] = layout
            layout.lie_in(self.memory.slot(number), files)
        layout.write(step, files, facts, self._device)

    def _grow(self, size: int) -> None:
        self._layouts.clear()
        self._unpin()
        self.memory.make_room(size)
        if self._device.type == "cuda":  # else copies would wait for the device
            memory = self.memory.bytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))

    def _unpin(self) -> None:
        if self._device.type == "cuda" and len(self.memory.bytes):
            torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(self.memory.bytes.data_ptr())


class _CopyLayout:
    """Where the parts of a copy are in its slot."""

    def __init__(self, files: Files, facts: str) -> None:
        self._kinds = _kinds(files)
        self._headers = {name: header_of(tensors) for name, tensors in files.items()}
        self._places: dict[str, tuple[int, int]] = {}
        end = HEAD_BYTES
        for name, (header, places) in self._headers.items():
            begin = _up(end + len(header)) - len(header)  # aligns the first tensor
            end = begin + len(header) + places[-1][1]
            self._places[name] = begin, end
        self._text_begin = end
        self.size = _up(end + len(self._text(1, facts)) * 5 // 4, mmap.PAGESIZE)  # it may get longer

    def fits(self, files: Files, facts: str) -> bool:
        end = self._text_begin + len(self._text(1 << 62, facts))
        return end <= len(self._slot) and self._kinds == _kinds(files)

    def lie_in(self, slot: Tensor, files: Files) -> None:
        self._words = slot[:HEAD_BYTES].view(torch.int64)
        self._words[0] = 0
        self._slot, self._targets = slot, list[Tensor]()
        for name, (header, places) in self._headers.items():
            begin = self._places[name][0]
            first = begin + len(header)
            slot[begin:first] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self._targets += [
                slot[first + here : first + there].view(tensor.dtype).view(tensor.shape)
                for tensor, (here, there) in zip(files[name], places, strict=True)
            ]

    def write(self, step: int, files: Files, facts: str, device: torch.device) -> None:
        self._set_step(0, device)
        text, begin = self._text(step, facts), self._text_begin
        self._slot[begin : begin + len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        self._words[1], self._words[2] = begin, len(text)
        stored = (tensor for tensors in files.values() for tensor in tensors)
        for target, tensor in zip(self._targets, stored, strict=True):
            for rows in tensor.chunks:
                target.copy_(rows, non_blocking=True)
        self._set_step(step, device)

    def _set_step(self, step: int, device: torch.device) -> None:
        self._words[:1].copy_(torch.full((1,), step, device=device), non_blocking=True)

    def _text(self, step: int, facts: str) -> bytearray:
        # With the step again: a GPU may still have to write the former copy, while this text is there.
        places = json.dumps(self._places)
        return bytearray(f'{{"step": {step}, "files": {places}, "facts": {facts}}}'.encode())


@dataclass(frozen=True)
class Copy:
    """A copy as another process, or its writer, reads it."""

    step: int
    facts: dict[str, Any]
    files: Mapping[str, memoryview]
    _head: memoryview

    @property
    def is_there(self) -> bool:
        """Whether it is still whole; if not, what was read of it may not be of its step."""
        return _words(self._head)[0] == self.step


def copies_in(fd: int) -> dict[int, Copy]:
    """The whole copies in the memory of a `CopyWriter`, by step."""
    if not (size := os.fstat(fd).st_size):
        return {}
    memory = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    found = {}
    for slot in (memory[: size // 2], memory[size // 2 :]):
        step, begin, length = _words(slot[:HEAD_BYTES])[:3]
        if not step:
            continue
        try:
            text = json.loads(bytes(slot[begin : begin + length]))
        except ValueError:
            continue
        if text["step"] == step:
            files = {name: slot[first:end] for name, (first, end) in text["files"].items()}
            found[step] = Copy(step, text["facts"], files, slot[:HEAD_BYTES])
    return found


def _words(head: memoryview) -> memoryview:
    return head.cast("q")


def _kinds(files: Files) -> list[tuple[Any, ...]]:
    return [(name, of.key, of.dtype, of.shape) for name, tensors in files.items() for of in tensors]


def _up(number: int, to: int = _ALIGNED) -> int:
    """The next multiple."""
    return -(-number // to) * to
