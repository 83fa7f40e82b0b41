"""Copies in memory that outlive the process that wrote them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.copies import CopyWriter, copies_in
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.safetensors_files import ToStore, tensors_in

CPU = torch.device("cpu")


def files(*tensors: Tensor) -> dict[str, list[ToStore]]:
    return {
        "some.safetensors": [
            ToStore(str(number), tensor.dtype, tuple(tensor.shape), (tensor,))
            for number, tensor in enumerate(tensors)
        ],
        "one.safetensors": [ToStore("one", torch.float32, (1,), (torch.ones(1),))],
    }


def test_copies_are_read_after_their_writer_was_killed() -> None:
    writer = CopyWriter(CPU)
    if (child := os.fork()) == 0:
        for step in (5, 6):
            writer.write(step % 2, step, files(torch.full((7,), step)), f'{{"of": {step}}}')
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = copies_in(writer.memory.fd)
    assert {step: copy.facts for step, copy in found.items()} == {5: {"of": 5}, 6: {"of": 6}}
    assert bytes(found[5].files["some.safetensors"]).endswith(torch.full((7,), 5).numpy().tobytes())


def test_a_copy_that_is_replaced_is_gone_at_once_and_the_other_stays() -> None:
    writer = CopyWriter(CPU)
    for step in (5, 6):
        writer.write(step % 2, step, files(torch.full((7,), step)), "{}")
    before = copies_in(writer.memory.fd)
    seen = []

    def interrupted() -> Iterator[Tensor]:
        seen.append(sorted(copies_in(writer.memory.fd)))
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        writer.write(1, 7, {**files(torch.zeros(7, dtype=torch.int64)), "one.safetensors": [
            ToStore("one", torch.float32, (1,), interrupted())]}, "{}")  # fmt: skip
    assert seen == [[6]] and sorted(copies_in(writer.memory.fd)) == [6]
    assert not before[5].is_there and before[6].is_there


def test_files_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = (
        torch.randn(3, 4).to(torch.complex64).T,
        torch.randn(4, 3).T,
        torch.tensor(7.5),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False, True]),
    )
    writer = CopyWriter(CPU)
    writer.write(1, 1, files(*tensors), "{}")
    (tmp_path / "file").write_bytes(copies_in(writer.memory.fd)[1].files["some.safetensors"])
    with PlainFile(tmp_path / "file") as file:
        found = tensors_in(file)
        assert torch.equal(found["0"].view(torch.complex64).view(4, 3), tensors[0])
        for number, tensor in enumerate(tensors[1:], start=1):
            assert found[str(number)].dtype == tensor.dtype and torch.equal(found[str(number)], tensor)


def test_a_copy_may_become_another_or_larger() -> None:
    writer = CopyWriter(CPU)
    facts = '{"of": 1}'
    for step, size in enumerate((10, 10, 5, 5, 10_000, 10_000, 3), start=1):
        if step == 3:
            facts = f'{{"of": "{"1" * 10_000}"}}'
        writer.write(step % 2, step, files(torch.full((size,), step)), facts)
        found = copies_in(writer.memory.fd)
        assert sorted(found) == ([step] if step in (1, 3, 5) else [step - 1, step])
        data = bytes(found[step].files["some.safetensors"])
        assert data.endswith(torch.full((size,), step).numpy().tobytes())


def test_without_memory_for_it_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = CopyWriter(CPU)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ValueError, match=r"mirror_every needs 0\.08 GB .* No space left on device; set it to 0"
    ):
        writer.write(1, 1, files(torch.empty(10_000_000)), "{}")
