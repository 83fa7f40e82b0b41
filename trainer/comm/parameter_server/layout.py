"""Which rows of each parameter are on which server, and in which messages they are sent.

Every parameter is split along its first dimension into one range of rows for each server, as by torch.chunk:
all servers share large tensors, and a layer's values come from all of them at once. Adjacent parameters of
the model share buckets: one message for each bucket and server.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import first_few
from trainer.local_shard import rows_of_shard


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
    """Parameters of one dtype that are sent together; frozen ones have separate buckets.

    `row_ranges` and `numels` are indexed by server.
    """

    index: int
    dtype: torch.dtype
    trainable: bool
    names: tuple[str, ...]
    row_ranges: tuple[tuple[RowRange, ...], ...]
    numels: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.numels) * self.dtype.itemsize


def lay_out(
    parameters: Mapping[str, Tensor], num_servers: int, bucket_bytes: int
) -> tuple[ShardedBucket, ...]:
    """Fill buckets of up to `bucket_bytes`, or of one parameter, in the order of `parameters`.

    Raises:
        ValueError: names the parameters without dimensions or without elements.
    """
    if bad := [name for name, value in parameters.items() if value.ndim == 0 or value.numel() == 0]:
        raise ValueError(f"{first_few(bad)} cannot be split into rows: give each a dimension and an element")
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
    by_server, numels = [], []
    for server in range(num_servers):
        own, at = [], 0
        for name in names:
            value = parameters[name]
            begin, end = rows_of_shard(len(value), server, num_servers)
            numel = (end - begin) * (value.numel() // len(value))
            own.append(RowRange(name, begin, end, at, numel))
            at += numel
        by_server.append(tuple(own))
        numels.append(at)
    first = parameters[names[0]]
    return ShardedBucket(
        index, first.dtype, first.requires_grad, tuple(names), tuple(by_server), tuple(numels)
    )


@torch.no_grad()
def unpack(bucket: ShardedBucket, server: int, message: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Copy a server's message into its rows of `parameters`, by name."""
    for span in bucket.row_ranges[server]:
        rows = parameters[span.name][span.begin : span.end]
        rows.copy_(message[span.at : span.at + span.numel].view(rows.shape))


def bytes_by_server(buckets: Sequence[ShardedBucket]) -> list[int]:
    """Bytes of values that each server holds."""
    columns = zip(*([n * bucket.dtype.itemsize for n in bucket.numels] for bucket in buckets), strict=True)
    return [sum(column) for column in columns]


def digest(buckets: Sequence[ShardedBucket]) -> int:
    """A hash of the layout, equal on two ranks only if their messages match."""
    return zlib.crc32(repr(tuple(buckets)).encode())
