"""The communication of a parameter server: workers push gradients to servers, and all ranks pull new values.

Each trainable parameter belongs to one server, its owner. gloo sends buckets between ranks through CPU
memory. Servers also get the values of other servers, because all ranks evaluate the model and update its
moving average. Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI
2014.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are sent as one flat tensor.

    A push also contains a flag for each parameter, which is 1 if the worker has a gradient for it.
    """

    owner: int
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    numel: int

    def values(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters]).cpu()

    def gradients(self) -> Tensor:
        given = [(parameter, parameter.grad) for parameter in self.parameters]
        parts = [(torch.zeros_like(p) if g is None else g.to_dense()).reshape(-1) for p, g in given]
        return torch.cat([*parts, parts[0].new_tensor([g is not None for _, g in given])]).cpu()

    def parts(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = flat.to(self.parameters[0]).split([p.numel() for p in self.parameters])
        return ((p, part.view(p.shape)) for p, part in zip(self.parameters, parts, strict=True))


class Exchange:
    """The communication of one rank, which may be a server, a worker or both.

    Args:
        parameters: the same on each rank; only those that require gradients are communicated.
        servers, workers: lists of ranks, which together contain every rank of `group`.
        bucket_bytes: the largest size of a bucket, unless a single parameter is larger.

    Attributes:
        moved: bytes that this rank received and sent as a server, in all steps.
        waited_s: seconds that this rank spent in `push` and `pull`, in all steps.
        steps: the number of steps.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        servers: Sequence[int],
        workers: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
    ) -> None:
        self._rank, self._group, self._workers = rank, group, workers
        self._others = sorted({*servers, *workers} - {rank})
        owner = owners(parameters, servers)
        self.owned = {server: [p for p in parameters if owner[p] == server] for server in servers}
        self._bucket_bytes = bucket_bytes
        self.follow_trainable()
        self.reset_counters()

    def follow_trainable(self) -> None:
        """Communicate the parameters that now require gradients, with the same owners as before."""
        self.buckets = [
            bucket
            for server, own in self.owned.items()
            for bucket in _buckets(server, [p for p in own if p.requires_grad], self._bucket_bytes)
        ]

    def reset_counters(self) -> None:
        self.moved, self.waited_s, self.steps = 0, 0.0, 0

    def bytes_of(self, server: int) -> int:
        """Return the total bytes that a server receives and sends in a step."""
        num_workers, num_others = sum(worker != server for worker in self._workers), len(self._others)
        own = [bucket for bucket in self.buckets if bucket.owner == server]
        received = sum((m.numel + len(m.parameters)) * m.dtype.itemsize for m in own)
        return num_workers * received + num_others * sum(m.numel * m.dtype.itemsize for m in own)

    @torch.no_grad()
    def push(self) -> None:
        """Give each server the workers' mean gradients for its parameters, and drop all other gradients."""
        start, works, pushed = time.perf_counter(), [], list[Tensor]()
        for number, bucket in enumerate(self.buckets):
            if self._rank in self._workers:
                pushed.append(bucket.gradients())
                if bucket.owner != self._rank:
                    works.append(dist.isend(pushed[-1], bucket.owner, self._group, number))
            for parameter in bucket.parameters:
                parameter.grad = None
        for number, bucket in enumerate(self.buckets):
            if bucket.owner == self._rank:
                mean, flags = self._mean(number, bucket, pushed).split([bucket.numel, len(bucket.parameters)])
                for (parameter, part), is_set in zip(bucket.parts(mean), self.used_flags(flags), strict=True):
                    parameter.grad = part if is_set else None
        _wait(works)
        self.steps += 1
        self.waited_s += time.perf_counter() - start

    def _mean(self, number: int, bucket: Bucket, pushed: Sequence[Tensor]) -> Tensor:
        """Return the mean of the workers' buckets, added in the order of ranks in fp32 or a wider dtype."""
        size = bucket.numel + len(bucket.parameters)
        parts = [
            pushed[number] if worker == self._rank else torch.empty(size, dtype=bucket.dtype)
            for worker in self._workers
        ]
        pairs = [(w, part) for w, part in zip(self._workers, parts, strict=True) if w != self._rank]
        _wait([dist.irecv(part, worker, self._group, number) for worker, part in pairs])
        self.moved += sum(part.nbytes for _, part in pairs)
        total = torch.zeros(size, dtype=torch.promote_types(bucket.dtype, torch.float32))
        for part in parts:
            total += part
        return total.div_(len(parts))

    def used_flags(self, flags: Tensor) -> list[bool]:
        """Return which parameters of a bucket have a gradient, from the mean of all workers' flags."""
        return (flags != 0).tolist()

    @torch.no_grad()
    def pull(self) -> None:
        """Send the parameters of each bucket from the rank that owns it to all other ranks."""
        start, works, arriving = time.perf_counter(), [], []
        for number, bucket in enumerate(self.buckets):
            if bucket.owner == self._rank:
                values = bucket.values()
                works += [dist.isend(values, other, self._group, number) for other in self._others]
                self.moved += values.nbytes * len(self._others)
            else:
                arriving.append((bucket, torch.empty(bucket.numel, dtype=bucket.dtype)))
                works.append(dist.irecv(arriving[-1][1], bucket.owner, self._group, number))
        _wait(works)
        for bucket, values in arriving:
            for parameter, part in bucket.parts(values):
                parameter.copy_(part)
        self.waited_s += time.perf_counter() - start


def owners(parameters: Sequence[nn.Parameter], servers: Sequence[int]) -> dict[nn.Parameter, int]:
    """Assign each parameter, largest first, to the server that has the fewest bytes so far.

    Frozen parameters are assigned last, because they may never be trained.
    """
    num_bytes, owner = dict.fromkeys(servers, 0), {}
    for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.nbytes)):
        owner[parameter] = min(servers, key=num_bytes.__getitem__)
        num_bytes[owner[parameter]] += parameter.nbytes
    return owner


def _buckets(owner: int, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[Bucket]:
    groups, size = list[list[nn.Parameter]](), 0
    for parameter in parameters:
        size += parameter.nbytes
        if not groups or size > bucket_bytes or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            size = parameter.nbytes
        groups[-1].append(parameter)
    for group in groups:
        yield Bucket(owner, tuple(group), group[0].dtype, sum(p.numel() for p in group))


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
