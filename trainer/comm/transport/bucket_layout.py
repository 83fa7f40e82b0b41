"""What ranks must agree on before they exchange a bucket, and the check of it."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import RECEIVED, SENT, GlooLink

SUMMED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
_HALF = (torch.float16, torch.bfloat16)
_HEADER_TAG = 0


@dataclass(frozen=True)
class Layout:
    """A bucket of `numel` elements of `dtype`, whose chunks are sent as `wire`."""

    numel: int
    dtype: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(cls, bucket: torch.Tensor, wire_dtype: torch.dtype | None) -> "Layout":
        """The layout of `bucket` sent as `wire_dtype`; None and half precision: sent unchanged.

        Raises:
            ValueError: a dtype that cannot be averaged.
        """
        if bucket.dtype not in SUMMED_DTYPES:
            raise ValueError(
                f"no all-reduce of {bucket.dtype}: gradients must be fp32, fp64, fp16, bf16 or int64"
            )
        unchanged = wire_dtype is None or bucket.dtype in (*_HALF, torch.int64)
        wire = bucket.dtype if unchanged or wire_dtype is None else wire_dtype
        return cls(bucket.numel(), bucket.dtype, wire)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Half precision is added in fp32."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    @property
    def header(self) -> list[int]:
        return [self.numel, SUMMED_DTYPES.index(self.dtype), SUMMED_DTYPES.index(self.wire)]

    @classmethod
    def read(cls, header: Sequence[int]) -> "Layout":
        numel, dtype, wire = header
        return cls(numel, SUMMED_DTYPES[dtype], SUMMED_DTYPES[wire])

    @property
    def tag(self) -> int:
        """Marks every message of this layout: ranks that disagree time out instead of adding garbage."""
        return zlib.crc32(repr(self).encode()) >> 1 | 1

    def __str__(self) -> str:
        return f"{self.numel} x {self.dtype} sent as {self.wire}"


def agree(
    layout: Layout, receive_from: Sequence[int], send_to: Sequence[int], links: dict[int, GlooLink]
) -> None:
    """Compare `layout` with the neighbours' before the first bucket of this layout.

    gloo aborts the process if sizes differ, and silently mixes dtypes; NCCL waits forever.

    Raises:
        PeerError: a neighbour has another layout, is gone, or does not answer in time.
    """
    header = torch.tensor(layout.header)
    headers = {peer: torch.zeros_like(header) for peer in receive_from}
    arriving = {peer: links[peer].receive(theirs, _HEADER_TAG) for peer, theirs in headers.items()}
    leaving = {peer: links[peer].send(header, _HEADER_TAG) for peer in send_to}
    for peer, work in arriving.items():
        links[peer].wait(work, RECEIVED)
    for peer, work in leaving.items():
        links[peer].wait(work, SENT)
    for peer, theirs in headers.items():
        if not torch.equal(theirs, header):
            other = Layout.read(theirs.tolist())
            raise PeerError(peer, f"has a bucket of {other}, but this rank has {layout}")
