"""Sums of gradients in integers, so that the bits do not depend on the order and grouping of additions.

A chunk is a fixed part of the global batch. Its gradient is truncated to multiples of 2**-50, so that the
chunks of all ranks can be added as int64 by any all-reduce or reduce-scatter. NaN, Inf and numbers beyond a
limit are invalid: the gradients that contain them are counted, the count is sent as an additional element,
and the sum becomes NaN.

Source: J. Demmel and H. D. Nguyen, "Parallel reproducible summation", 2015.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.exact.sum_checks import NO_CHECKS, SumChecks
from trainer.tensors.local_shard import is_dtensor, sharded_like, to_local

_SCALE = 2.0**50
_BLOCK = 1 << 15  # elements to process at once on a CPU, so that they stay in its cache
_SMALL = 1 << 17  # elements of a parameter, up to which copying costs less than a separate call


def limit(num_chunks: int) -> float:
    """Return the largest element of a chunk's gradient for which the sum over all chunks fits in 64 bits."""
    return min(512.0, 2.0**63 / _SCALE / num_chunks)


class Encoder:
    """Converts gradients of chunks to integers and adds them, in scratch buffers that are allocated once."""

    def __init__(self, num_chunks: int) -> None:
        self._limit = limit(num_chunks)
        self._scratch = {np.dtype(kind): np.empty(_BLOCK, kind) for kind in (np.float32, np.float64)}
        self._message: Tensor | None = None

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        """Return zeros (numel,), int64, in a scratch buffer that is reused by the next call."""
        if self._message is None or len(self._message) < numel:
            self._message = torch.empty(numel, dtype=torch.int64, device=device)
        return self._message[:numel].zero_()

    def add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to `sums`, both (numel,); count invalid gradients in `count`."""
        (self._add_on_cpu if gradient.is_cpu else self._add)(sums, count, gradient)

    def _add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        lowest, highest = torch.aminmax(gradient)  # propagates NaN; takes a tenth of the time of a norm
        count += ~((lowest > -self._limit) & (highest < self._limit))
        wide = gradient.float() if gradient.itemsize < 4 else gradient
        sums += (wide * _SCALE).to(torch.int64)  # exact until truncation: a power of two

    @np.errstate(all="ignore")
    def _add_on_cpu(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        """Like `_add`, but with NumPy, which converts and adds in one pass, in half the time."""
        for part, block in zip(gradient.split(_BLOCK), sums.split(_BLOCK), strict=True):
            numbers = (part.float() if part.itemsize < 4 else part).numpy()
            if not (numbers.min(initial=0) > -self._limit and numbers.max(initial=0) < self._limit):
                count += 1  # adds meaningless integers, as `_add` does: hashes must not depend on blocks
            scaled = np.multiply(numbers, _SCALE, out=self._scratch[numbers.dtype][: len(numbers)])
            np.add(block.numpy(), scaled, out=block.numpy(), dtype=np.int64, casting="unsafe")


def decode(sums: Tensor, count: Tensor, out: Tensor) -> None:
    """Convert `sums` back to floating point, into `out`, both (numel,)."""
    size = _BLOCK if out.is_cpu else max(1, len(out))
    for part, numbers in zip(sums.split(size), out.split(size), strict=True):
        # Through fp64: vectorized and scalar conversions of int64 to fp32 may round differently.
        numbers.copy_(part.double().mul_(1 / _SCALE))
    if not count.is_cpu or count > 0:
        out.masked_fill_(count > 0, math.nan)


@dataclass
class _Group:
    """Parameters of one dtype on one device; small parameters come first, and are encoded together."""

    parameters: list[nn.Parameter]
    offsets: list[int]  # the offset of each parameter in `sums`
    num_small: int
    sums: Tensor
    count: Tensor
    small: Tensor  # scratch for the gradients of small parameters


class ChunkSums:
    """Sums of the gradients of one process's chunks, for parameters that are not sharded.

    They take 8 bytes of memory per element, unless every step has only one chunk.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], num_chunks: int, checks: SumChecks = NO_CHECKS
    ) -> None:
        self._encoder, self._checks = Encoder(num_chunks), checks
        self._had: set[nn.Parameter] = set()
        self._messages: dict[int, Tensor] = {}
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of `parameters` from the next step on."""
        if unfit := [name for name, parameter in parameters.items() if parameter.is_complex()]:
            raise UserError(
                f"train.exact is not supported with complex parameters such as {unfit[0]}, because it adds "
                "gradients as integers; use two real parameters, joined by torch.complex, or set "
                "train.exact=null"
            )
        self.parameters = dict.fromkeys(parameters.values()).keys()
        self._groups: list[_Group] = []
        self._offsets: dict[Tensor, tuple[_Group, int]] = {}

    def reset(self) -> None:
        """Clear the sums; called before the first chunk of a step."""
        self._had.clear()
        self.discard()

    def discard(self) -> None:
        """Set the sums to zero."""
        for group in self._groups:
            group.sums.zero_()
            group.count.zero_()

    @torch.no_grad()
    def add_chunk(self) -> None:
        """Add the gradients of a chunk to the sums, and set the gradients to None."""
        if not self._groups:
            self._groups = _grouped(list(self.parameters))
            self._offsets = {
                p: (group, offset)
                for group in self._groups
                for p, offset in zip(group.parameters, group.offsets, strict=True)
            }
        for group in self._groups:
            given = [parameter for parameter in group.parameters if parameter.grad is not None]
            self._had.update(given)
            with self._checks.adding(partial(_segments, group)):
                self._add_group(group)
            for parameter in given:
                parameter.grad = None

    def _add_group(self, group: "_Group") -> None:
        small, large = group.parameters[: group.num_small], group.parameters[group.num_small :]
        if any(parameter.grad is not None for parameter in small):
            torch.cat([_row(parameter) for parameter in small], out=group.small)
            self._encoder.add(group.sums[: len(group.small)], group.count, group.small)
        for parameter in large:
            if parameter.grad is not None:
                offset, row = self._offsets[parameter][1], _row(parameter)
                self._encoder.add(group.sums[offset : offset + len(row)], group.count, row)

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Set the gradient of each parameter that had a gradient in any chunk to the sum over the chunks."""
        for group in self._groups:
            decode(group.sums[: len(group.small)], group.count, group.small)
            for number, (parameter, start) in enumerate(zip(group.parameters, group.offsets, strict=True)):
                end = start + to_local(parameter).numel()
                if parameter not in self._had:
                    continue
                if number < group.num_small:
                    row = group.small[start:end]
                else:
                    row = torch.empty(end - start, dtype=parameter.dtype, device=group.sums.device)
                    decode(group.sums[start:end], group.count, row)
                parameter.grad = _as_gradient(row, parameter)

    def start_last_chunk(self) -> None:
        """Add zero gradients before the last chunk of a step, if DDP looks for unused parameters.

        DDP treats a parameter that an earlier chunk used as used, and then expects it to have a gradient.
        """
        for parameter in self._had:
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def message(self, bucket: dist.GradBucket) -> "Message":
        """Return the sums over all chunks for a bucket, including the gradients in the bucket itself."""
        row, index = bucket.buffer(), bucket.index()
        message = self._messages.get(index)
        if message is None or len(message) != len(row) + 1:  # DDP rebuilds its buckets once
            message = self._messages[index] = torch.empty(len(row) + 1, dtype=torch.int64, device=row.device)
        message.zero_()
        start = 0
        for parameter in bucket.parameters():
            end = start + parameter.numel()
            if parameter in self._offsets:
                group, offset = self._offsets[parameter]
                message[start:end] = group.sums[offset : offset + end - start]
                message[-1:] += group.count
            start = end
        sizes = [parameter.numel() for parameter in bucket.parameters()]
        with self._checks.adding(lambda: zip(bucket.parameters(), message[:-1].split(sizes), strict=True)):
            self._encoder.add(message[:-1], message[-1:], row)
        self._checks.sent(message)
        return Message(message, bucket, self._checks)


class Message:
    """A DDP bucket as integers, followed by the number of its invalid gradients."""

    def __init__(self, sums: Tensor, bucket: dist.GradBucket, checks: SumChecks = NO_CHECKS) -> None:
        self._sums, self._gradients, self.is_last = sums, bucket.buffer(), bucket.is_last
        self._checks = checks

    def buffer(self) -> Tensor:
        return self._sums

    def decoded(self) -> Tensor:
        """Return the gradients, converted from the integers that have been summed over ranks."""
        self._checks.received(self._sums)
        decode(self._sums[:-1], self._sums[-1], self._gradients)
        return self._gradients


def _grouped(parameters: Sequence[nn.Parameter]) -> list[_Group]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dtype, to_local(parameter).device].append(parameter)
    groups = []
    for (dtype, device), members in kinds.items():
        small = [p for p in members if to_local(p).numel() <= _SMALL]
        members = [*small, *(p for p in members if to_local(p).numel() > _SMALL)]
        sizes = [to_local(p).numel() for p in members]
        offsets = [0, *accumulate(sizes)][:-1]
        groups.append(
            _Group(
                members,
                offsets,
                len(small),
                torch.zeros(sum(sizes), dtype=torch.int64, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.zeros(sum(sizes[: len(small)]), dtype=dtype, device=device),
            )
        )
    return groups


def _segments(group: _Group) -> Iterator[tuple[nn.Parameter, Tensor]]:
    sizes = [to_local(parameter).numel() for parameter in group.parameters]
    return zip(group.parameters, group.sums.split(sizes), strict=True)


def _row(parameter: nn.Parameter) -> Tensor:
    """Return the gradient (zeros if None) as a row, with its elements in the order of a DDP bucket."""
    if parameter.grad is None:
        return torch.zeros(to_local(parameter).numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.is_sparse:
        raise UserError(
            "train.exact is not supported with sparse gradients, because it adds gradients as dense "
            "integers; create the embedding with sparse=False, or set train.exact=null"
        )
    gradient = to_local(parameter.grad)
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    return gradient.permute(_by_stride(parameter)).reshape(-1)


def _as_gradient(row: Tensor, parameter: nn.Parameter) -> Tensor:
    local, order = to_local(parameter), _by_stride(parameter)
    inverse = [order.index(dim) for dim in range(local.ndim)]
    gradient = row.view([local.shape[dim] for dim in order]).permute(inverse)
    return sharded_like(parameter, gradient) if is_dtensor(parameter) else gradient


def _by_stride(parameter: nn.Parameter) -> list[int]:
    strides = to_local(parameter).stride()
    return sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
