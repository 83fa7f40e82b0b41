"""Which rows of which parameter lie on which server, and in which messages they travel.

Every parameter is cut along its first dimension into one range of rows for each server, as torch.chunk cuts:
large tensors are shared by all servers, and a layer's values come from all of them at once. Parameters that
follow each other in the model travel together, in buckets: one message for each bucket and server.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowRange:
    """The rows [begin, end) of a parameter, at the elements [at, at + numel) of a message."""

    name: str
    begin: int
    end: int
    at: int
    numel: int


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters of one dtype that travel together; frozen ones are in buckets of their own.

    `pieces` and `numels` are by server.
    """

    index: int
    dtype: torch.dtype
    trainable: bool
    names: tuple[str, ...]
    pieces: tuple[tuple[RowRange, ...], ...]
    numels: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.numels) * self.dtype.itemsize


def lay_out(
    parameters: Mapping[str, Tensor], num_servers: int, bucket_bytes: int
) -> tuple[ShardedBucket, ...]:
    """Fill buckets of up to `bucket_bytes`, or of one parameter, in the order of `parameters`.

    Raises:
        ValueError: parameters without a dimension, or without an element, by name.
    """
    if bad := [name for name, value in parameters.items() if value.ndim == 0 or value.numel() == 0]:
        raise ValueError(
            f"{', '.join(bad[:5])} cannot be cut into rows: give each a dimension and an element"
        )
    groups: list[list[str]] = []
    kind, filled = None, 0
    for name, value in parameters.items():
        own = (value.dtype, value.requires_grad)
        if own != kind or filled + value.nbytes > bucket_bytes:
            groups.append([])
            kind, filled = own, 0
        groups[-1].append(name)
        filled += value.nbytes
    return tuple(_bucket(index, names, parameters, num_servers) for index, names in enumerate(groups))


def _bucket(
    index: int, names: Sequence[str], parameters: Mapping[str, Tensor], num_servers: int
) -> ShardedBucket:
    pieces, numels = [], []
    for server in range(num_servers):
        own, at = [], 0
        for name in names:
            value = parameters[name]
            begin, end = rows_of(len(value), num_servers, server)
            numel = (end - begin) * (value.numel() // len(value))
            own.append(RowRange(name, begin, end, at, numel))
            at += numel
        pieces.append(tuple(own))
        numels.append(at)
    first = parameters[names[0]]
    return ShardedBucket(index, first.dtype, first.requires_grad, tuple(names), tuple(pieces), tuple(numels))


def rows_of(rows: int, num_servers: int, server: int) -> tuple[int, int]:
    """The rows [begin, end) of a server, by the rule of torch.chunk, which DTensor goes by, too."""
    size = -(-rows // num_servers)
    return min(rows, server * size), min(rows, (server + 1) * size)


@torch.no_grad()
def unpack(bucket: ShardedBucket, server: int, message: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Put what a server sent into its rows of `parameters`, by name."""
    for piece in bucket.pieces[server]:
        rows = parameters[piece.name][piece.begin : piece.end]
        rows.copy_(message[piece.at : piece.at + piece.numel].view(rows.shape))


def bytes_by_server(buckets: Sequence[ShardedBucket]) -> list[int]:
    """What each server holds, and sends to each worker that pulls."""
    columns = zip(*([n * bucket.dtype.itemsize for n in bucket.numels] for bucket in buckets), strict=True)
    return [sum(column) for column in columns]


def digest(buckets: Sequence[ShardedBucket]) -> int:
    """A number that two ranks have in common only if they would cut and send alike."""
    return zlib.crc32(repr(tuple(buckets)).encode())
