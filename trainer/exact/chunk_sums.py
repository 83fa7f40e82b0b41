"""Sums of gradients as integers, which have the same bits in any order, grouping and cut.

A chunk is a fixed part of the global batch. Its gradient is truncated to whole multiples of 2**-50, so that
the chunks of all ranks add up in int64, by any all-reduce or reduce-scatter. A gradient with NaN, Inf or
numbers beyond a limit has no such form: these are counted, the count is sent as one more element, and the
sum becomes NaN.

Source, for sums without an order: Demmel and Nguyen, "Parallel reproducible summation", 2015.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.tensors.local_shard import is_dtensor, to_local

_SCALE = 2.0**50
_BLOCK = 1 << 15  # elements, on a CPU: what a block needs stays in its cache
_SMALL = 1 << 17  # elements of a parameter, for which a copy costs less than a call of its own


def limit(num_chunks: int) -> float:
    """The numbers of a chunk's gradient must be below it, so that the sum of all chunks fits in 64 bits."""
    return min(512.0, 2.0**63 / _SCALE / num_chunks)


class Encoder:
    """Adds gradients of a number of chunks to integer sums; its scratch buffers are allocated once."""

    def __init__(self, num_chunks: int) -> None:
        self._limit = limit(num_chunks)
        self._scratch = {np.dtype(kind): np.empty(_BLOCK, kind) for kind in (np.float32, np.float64)}
        self._message: Tensor | None = None

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        """Scratch for a message of (numel,), int64: valid up to the next call."""
        if self._message is None or len(self._message) < numel:
            self._message = torch.empty(numel, dtype=torch.int64, device=device)
        return self._message[:numel].zero_()

    def add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to `sums`, both (numel,); count its parts that have no such form."""
        (self._add_on_cpu if gradient.is_cpu else self._add)(sums, count, gradient)

    def _add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        lowest, highest = torch.aminmax(gradient)  # NaN if any is; a tenth of the time of a norm
        count += ~((lowest > -self._limit) & (highest < self._limit))
        wide = gradient.float() if gradient.itemsize < 4 else gradient
        sums += (wide * _SCALE).to(torch.int64)  # exact up to the cut, as by any power of two

    def _add_on_cpu(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        """`_add` by NumPy: what converts while it adds takes half the time of two passes."""
        for part, here in zip(gradient.split(_BLOCK), sums.split(_BLOCK), strict=True):
            numbers = (part.float() if part.itemsize < 4 else part).numpy()
            if not (numbers.min(initial=0) > -self._limit and numbers.max(initial=0) < self._limit):
                count += 1
                continue
            scaled = np.multiply(numbers, _SCALE, out=self._scratch[numbers.dtype][: len(numbers)])
            np.add(here.numpy(), scaled, out=here.numpy(), dtype=np.int64, casting="unsafe")


def decode(sums: Tensor, count: Tensor, out: Tensor) -> None:
    """Write what `sums` stands for to `out`, both (numel,)."""
    size = _BLOCK if out.is_cpu else max(1, len(out))
    for part, numbers in zip(sums.split(size), out.split(size), strict=True):
        # By way of fp64: a conversion to fp32 need not round alike in a vector and in the rest behind it.
        numbers.copy_(part.double().mul_(1 / _SCALE))
    if not count.is_cpu or count > 0:
        out.masked_fill_(count > 0, math.nan)


@dataclass
class _Group:
    """Parameters of one dtype on one device; the small ones come first, and are encoded together."""

    parameters: list[nn.Parameter]
    begins: list[int]  # where the elements of each begin in `sums`
    num_small: int
    sums: Tensor
    count: Tensor
    small: Tensor  # scratch for the gradients of the small ones


class ChunkSums:
    """Adds the chunks of one process, for parameters that it holds whole.

    Memory: 8 bytes an element, once there was a chunk other than the last one of a step.

    Raises:
        UserError: a parameter is complex.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_chunks: int) -> None:
        self._encoder = Encoder(num_chunks)
        self._had: set[nn.Parameter] = set()
        self._messages: dict[int, Tensor] = {}
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of these parameters instead, from the next step on."""
        if unfit := [name for name, parameter in parameters.items() if parameter.is_complex()]:
            raise UserError(
                f"train.exact adds gradients as integers, but {unfit[0]} has complex numbers; keep it as two "
                "real parameters (torch.complex joins them), or set train.exact=null"
            )
        self.parameters = dict.fromkeys(parameters.values()).keys()
        self._groups: list[_Group] = []
        self._place: dict[Tensor, tuple[_Group, int]] = {}

    def reset(self) -> None:
        """Called before the first chunk of a step."""
        self._had.clear()
        for group in self._groups:
            group.sums.zero_()
            group.count.zero_()

    @torch.no_grad()
    def add_chunk(self) -> None:
        """Add the gradients of a chunk, and leave no parameter any.

        Raises:
            UserError: a gradient is sparse.
        """
        if not self._groups:
            self._groups = _grouped(list(self.parameters))
            self._place = {
                p: (group, begin)
                for group in self._groups
                for p, begin in zip(group.parameters, group.begins, strict=True)
            }
        for group in self._groups:
            there = [parameter for parameter in group.parameters if parameter.grad is not None]
            self._had.update(there)
            small, large = group.parameters[: group.num_small], group.parameters[group.num_small :]
            if any(parameter.grad is not None for parameter in small):
                torch.cat([_row(parameter) for parameter in small], out=group.small)
                self._encoder.add(group.sums[: len(group.small)], group.count, group.small)
            for parameter in large:
                if parameter.grad is not None:
                    begin, row = self._place[parameter][1], _row(parameter)
                    self._encoder.add(group.sums[begin : begin + len(row)], group.count, row)
            for parameter in there:
                parameter.grad = None

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Set the sums as gradients, of the parameters that had any in some chunk."""
        for group in self._groups:
            decode(group.sums[: len(group.small)], group.count, group.small)
            for number, (parameter, begin) in enumerate(zip(group.parameters, group.begins, strict=True)):
                end = begin + to_local(parameter).numel()
                if parameter not in self._had:
                    continue
                if number < group.num_small:
                    row = group.small[begin:end]
                else:
                    row = torch.empty(end - begin, dtype=parameter.dtype, device=group.sums.device)
                    decode(group.sums[begin:end], group.count, row)
                parameter.grad = _as_gradient(row, parameter)

    def start_last_chunk(self) -> None:
        """Called before the last chunk, if DDP looks for unused parameters.

        To DDP, one that an earlier chunk of the step has used is used, and must then have a gradient.
        """
        for parameter in self._had:
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def message(self, bucket: dist.GradBucket) -> "Message":
        """The last chunk's gradients of a bucket, with those of `add_chunk`: integers to be all-reduced."""
        row, index = bucket.buffer(), bucket.index()
        message = self._messages.get(index)
        if message is None or len(message) != len(row) + 1:  # DDP rebuilds its buckets once
            message = self._messages[index] = torch.empty(len(row) + 1, dtype=torch.int64, device=row.device)
        message.zero_()
        begin = 0
        for parameter in bucket.parameters():
            end = begin + parameter.numel()
            if parameter in self._place:
                group, at = self._place[parameter]
                message[begin:end] = group.sums[at : at + end - begin]
                message[-1:] += group.count
            begin = end
        self._encoder.add(message[:-1], message[-1:], row)
        return Message(message, bucket)


class Message:
    """A bucket in place of DDP's: of integers, with their count as the last element."""

    def __init__(self, sums: Tensor, bucket: dist.GradBucket) -> None:
        self._sums, self._gradients, self.is_last = sums, bucket.buffer(), bucket.is_last

    def buffer(self) -> Tensor:
        return self._sums

    def decoded(self) -> Tensor:
        """The gradients, once the integers are those of all ranks."""
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
        begins = [0, *accumulate(sizes)][:-1]
        groups.append(
            _Group(
                members,
                begins,
                len(small),
                torch.zeros(sum(sizes), dtype=torch.int64, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.zeros(sum(sizes[: len(small)]), dtype=dtype, device=device),
            )
        )
    return groups


def _row(parameter: nn.Parameter) -> Tensor:
    """The gradient as a row, zeros if there is none, in the order in which DDP's bucket has its elements."""
    if parameter.grad is None:
        return torch.zeros(to_local(parameter).numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.is_sparse:
        raise UserError(
            "train.exact adds gradients as integers in a dense row, but a gradient is sparse; build the "
            "embedding with sparse=False, or set train.exact=null"
        )
    gradient = to_local(parameter.grad)
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    return gradient.permute(_by_stride(parameter)).reshape(-1)


def _as_gradient(row: Tensor, parameter: nn.Parameter) -> Tensor:
    local, order = to_local(parameter), _by_stride(parameter)
    back = [order.index(dim) for dim in range(local.ndim)]
    gradient = row.view([local.shape[dim] for dim in order]).permute(back)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        mesh, shape = parameter.device_mesh, parameter.shape
        return DTensor.from_local(
            gradient, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride()
        )
    return gradient


def _by_stride(parameter: nn.Parameter) -> list[int]:
    """The dimensions from the slowest to the fastest in memory."""
    strides = to_local(parameter).stride()
    return sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
