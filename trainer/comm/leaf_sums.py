"""Sums of gradients as integers, which have the same bits in any order, grouping and cut.

A leaf is a fixed part of the global batch. Its gradient is truncated to whole multiples of 2**-50, so that
the leaves of all ranks add up in int64, by any all-reduce or reduce-scatter. A gradient with NaN, Inf or
numbers beyond a limit has no such form: these are counted, the count is sent as one more element, and the
sum becomes NaN.

Source, for sums without an order: Demmel and Nguyen, "Parallel reproducible summation", 2015.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.errors import UserError
from trainer.local_shard import to_local

_SCALE = 2.0**50
_CHUNK = 1 << 15  # elements, on a CPU: what a chunk needs stays in its cache

Send = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""Write the sum of this rank's block of all ranks' messages to the first tensor; the second is a message."""


def limit(num_leaves: int) -> float:
    """The numbers of a leaf's gradient must be below it, so that the sum of all leaves fits in 64 bits."""
    return min(512.0, 2.0**63 / _SCALE / num_leaves)


class Encoder:
    """Adds gradients of so many leaves to integer sums; its scratch buffers are allocated once."""

    def __init__(self, num_leaves: int) -> None:
        self._limit = limit(num_leaves)
        self._scratch: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self._message: Tensor | None = None

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        """Scratch for a message of (numel,), int64: valid up to the next call."""
        if self._message is None or len(self._message) < numel:
            self._message = torch.empty(numel, dtype=torch.int64, device=device)
        return self._message[:numel].zero_()

    def add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to `sums`, both (numel,); count its parts that have no such form."""
        size = _CHUNK if gradient.device.type == "cpu" else max(1, len(gradient))
        for begin in range(0, len(gradient), size):
            self._add(sums[begin : begin + size], count, gradient[begin : begin + size])

    def _add(self, sums: Tensor, count: Tensor, gradient: Tensor) -> None:
        if gradient.itemsize < 4:
            gradient = gradient.float()
        scaled, integers = self._scratch.get(gradient.dtype, (gradient[:0], sums[:0]))
        if len(scaled) < len(gradient):
            scaled, integers = torch.empty_like(gradient), torch.empty_like(sums)
            self._scratch[gradient.dtype] = scaled, integers
        scaled, integers = scaled[: len(gradient)], integers[: len(gradient)]
        lowest, highest = torch.aminmax(gradient)  # NaN if any is; a tenth of the time of a norm
        if gradient.is_cuda:
            count += ~((lowest > -self._limit) & (highest < self._limit))
        elif not (lowest.item() > -self._limit and highest.item() < self._limit):
            count += 1
        torch.mul(gradient, _SCALE, out=scaled)  # exact, as by any power of two
        sums += integers.copy_(scaled)


def decode(sums: Tensor, count: Tensor, out: Tensor) -> None:
    """Write what `sums` stands for to `out`, both (numel,)."""
    # By way of fp64: a conversion to fp32 need not round alike in a vector and in the rest behind it.
    out.copy_(sums.double().mul_(1 / _SCALE))
    if count.is_cuda or count > 0:
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


class LeafSums:
    """Adds the leaves of one process, for parameters that it holds whole.

    Memory: 8 bytes an element, once there was a leaf other than the last one of a step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_leaves: int) -> None:
        self._names, self._encoder = dict(parameters), Encoder(num_leaves)
        self._groups: list[_Group] = []
        self._place: dict[Tensor, tuple[_Group, int]] = {}
        self._had: set[nn.Parameter] = set()
        self._messages: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Called before the first leaf of a step."""
        self._had.clear()
        for group in self._groups:
            group.sums.zero_()
            group.count.zero_()

    @torch.no_grad()
    def take(self) -> None:
        """Add the gradients of a leaf, and leave no parameter any.

        Raises:
            UserError: a gradient is sparse.
        """
        if not self._groups:
            self._groups = _grouped(list(self._names.values()))
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
    def give(self) -> None:
        """Set the sums as gradients, of the parameters that had any in some leaf."""
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

    def check(self) -> None:
        """Called after the last leaf of a step, where DDP set the gradients.

        Raises:
            UserError: DDP set none for a parameter that had one in an earlier leaf of this process.
        """
        if lost := [name for name, p in self._names.items() if p in self._had and p.grad is None]:
            raise UserError(
                f"train.exact: {lost[0]} was used in a part of the batch, but in the last part of no rank, "
                "and DDP then leaves it out; use strategy=single or fsdp, or use it in each part"
            )

    @torch.no_grad()
    def message(self, bucket: dist.GradBucket) -> "Message":
        """The last leaf's gradients of a bucket, with those that `take` added: integers to be all-reduced."""
        row, index = bucket.buffer(), bucket.index()
        if row.is_sparse:
            raise UserError(SPARSE)
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
        return Message(message, index, row)


@dataclass(frozen=True)
class Message:
    """A bucket in place of DDP's: of integers, with their count as the last element."""

    _sums: Tensor
    _index: int
    _gradients: Tensor

    def buffer(self) -> Tensor:
        return self._sums

    def index(self) -> int:
        return self._index

    def decoded(self) -> Tensor:
        """The gradients, once the integers are those of all ranks."""
        decode(self._sums[:-1], self._sums[-1], self._gradients)
        return self._gradients


class ShardSums:
    """Adds the leaves of all ranks for one unit of FSDP, in this rank's shard: 8 bytes an element of it.

    torch is given the sum of all leaves so far as a new gradient, so a unit that the last leaf does not use
    keeps that of the others.

    Args:
        parameters: of the unit, sharded.
        send: the reduce-scatter.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], encoder: Encoder, send: Send) -> None:
        self._name, self._parameters, self._encoder, self._send = name, parameters, encoder, send
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """Called before the first leaf of a step."""
        if self._sums is not None:
            self._sums.zero_()

    @torch.no_grad()
    def add(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Add a leaf's `gradients` of the unit, a block for each rank; write this rank's sum to `output`.

        Raises:
            UserError: a leaf used only some parameters of the unit: torch leaves out the others.
        """
        world, numel = dist.get_world_size(group), len(output)
        if self._sums is None:
            self._sums = torch.zeros(numel + 1, dtype=torch.int64, device=output.device)
        if numel != self._num_elements(world):
            raise UserError(
                f"train.exact: a part of the batch used only some parameters of {self._name}, and under "
                "strategy=fsdp a unit's are added as one; use strategy=ddp "
                "strategy.find_unused_parameters=true, or freeze what is never used (model.freeze)"
            )
        message = self._encoder.zeros(world * (numel + 1), output.device).view(world, -1)
        count = torch.zeros_like(self._sums[-1:])
        for to, own in zip(message, gradients.view(world, numel), strict=True):
            self._encoder.add(to[:-1], count, own)
        message[:, -1] = count
        block = torch.empty_like(self._sums)
        self._send(block, message.view(-1), group)
        self._sums += block
        for parameter in self._parameters:
            parameter.grad = None  # else torch would add the new sum to the former
        decode(self._sums[:-1], self._sums[-1], output)

    def _num_elements(self, world: int) -> int:
        """Of the shard, padded as torch does it: the rows of each parameter are cut into equal parts."""
        return sum(-(-p.shape[0] // world) * math.prod(p.shape[1:]) for p in self._parameters)


def native_reduce_scatter(block: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_tensor(block, message, group=group)


SPARSE = (
    "train.exact adds gradients as integers in a dense row, but a gradient is sparse; build the embedding "
    "with sparse=False, or set train.exact=null"
)


def _grouped(parameters: Sequence[nn.Parameter]) -> list[_Group]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kinds[parameter.dtype, to_local(parameter).device].append(parameter)
    groups = []
    for (dtype, device), members in kinds.items():
        small = [p for p in members if to_local(p).numel() <= _CHUNK]
        members = [*small, *(p for p in members if to_local(p).numel() > _CHUNK)]
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
        raise UserError(SPARSE)
    gradient = to_local(parameter.grad)
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    return gradient.permute(_by_stride(parameter)).reshape(-1)


def _as_gradient(row: Tensor, parameter: nn.Parameter) -> Tensor:
    local, order = to_local(parameter), _by_stride(parameter)
    back = [order.index(dim) for dim in range(local.ndim)]
    gradient = row.view([local.shape[dim] for dim in order]).permute(back)
    if isinstance(parameter, DTensor):
        mesh, shape = parameter.device_mesh, parameter.shape
        return DTensor.from_local(
            gradient, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride()
        )
    return gradient


def _by_stride(parameter: nn.Parameter) -> list[int]:
    """The dimensions from the slowest to the fastest in memory."""
    strides = to_local(parameter).stride()
    return sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
