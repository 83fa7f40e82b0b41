"""Headers of safetensors files."""

from types import SimpleNamespace
from typing import Any

import torch

from trainer.checkpoint.safetensors_files import ToStore, header_of, read_header


def test_a_file_may_have_many_gigabytes() -> None:
    tensors = [ToStore(name, torch.float32, (1 << 20, 1 << 14), ()) for name in "abc"]  # of 64 GiB each
    header, places = header_of(tensors)
    file: Any = SimpleNamespace(
        path="far.safetensors",
        size=len(header) + places[-1][1],
        read_at=lambda begin, size: header[begin : begin + size],
    )
    assert [(found.begin, found.end) for found in read_header(file).values()] == [
        (len(header) + begin, len(header) + end) for begin, end in places
    ]
