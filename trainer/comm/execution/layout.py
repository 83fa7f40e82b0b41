"""What ranks must agree on before they exchange a bucket, and the check that they do."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.comm.execution.blame import PeerError
from trainer.comm.execution.gloo import RECEIVED, SENT, GlooLink

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_HALF = (torch.float16, torch.bfloat16)
_HEADER_TAG = 0


@dataclass(frozen=True)
class Layout:
    """A bucket of `numel` elements of `dtype`, whose sums travel as `wire`."""

    numel: int
    dtype: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(cls, bucket: torch.Tensor, wire_dtype: torch.dtype | None) -> "Layout":
        """The layout of `bucket` where sums travel as `wire_dtype`; None and half precision: as they are.

        Raises:
            ValueError: a dtype that cannot be averaged.
        """
        if bucket.dtype not in DTYPES:
            raise ValueError(f"cannot all-reduce {bucket.dtype}; gradients are fp32, fp64, fp16 or bf16")
        wire = bucket.dtype if wire_dtype is None or bucket.dtype in _HALF else wire_dtype
        return cls(bucket.numel(), bucket.dtype, wire)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Half precision is added up in fp32."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    @property
    def tag(self) -> int:
        """Marks every message of this layout: ranks that disagree wait in vain instead of adding garbage."""
        return zlib.crc32(repr(self).encode()) >> 1 | 1

    def __str__(self) -> str:
        return f"{self.numel} x {self.dtype} sent as {self.wire}"


def agree(
    layout: Layout, receive_from: Sequence[int], send_to: Sequence[int], links: dict[int, GlooLink]
) -> None:
    """Compare `layout` with what the neighbours have, before the first bucket of its kind.

    gloo aborts the process when sizes differ and mixes dtypes without a word; NCCL waits for ever.

    Raises:
        PeerError: a neighbour has another layout, is gone, or does not answer in time.
    """
    header = torch.tensor([layout.numel, DTYPES.index(layout.dtype), DTYPES.index(layout.wire)])
    headers = {peer: torch.zeros_like(header) for peer in receive_from}
    arriving = {peer: links[peer].receive(theirs, _HEADER_TAG) for peer, theirs in headers.items()}
    leaving = {peer: links[peer].send(header, _HEADER_TAG) for peer in send_to}
    for peer, work in arriving.items():
        links[peer].wait(work, RECEIVED)
    for peer, work in leaving.items():
        links[peer].wait(work, SENT)
    for peer, theirs in headers.items():
        if not torch.equal(theirs, header):
            numel, dtype, wire = theirs.tolist()
            other = Layout(numel, DTYPES[dtype], DTYPES[wire])
            raise PeerError(peer, f"has a bucket of {other}, where this rank has {layout}")
