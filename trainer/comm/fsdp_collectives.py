"""Gives the units of a `fully_shard` model the chosen all-gather and reduce-scatter.

FSDP2 asks a custom object for memory and then for the collective, unit by unit: parameters before a
unit is computed, forward and backward, gradients after its backward pass. All ranks ask in the order of the
computation, so one queue serves both collectives (fsdp_movers.py).

On CPUs torch's own collectives block the computing thread until they are done. These do not: a worker moves
the blocks, and the computation waits for parameters when it needs them, for gradients at the end of the
backward pass unless they are read before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.comm.algorithms.gather_scatter import all_gather, reduce_scatter
from trainer.comm.algorithms.schedule import Collective
from trainer.comm.fsdp_movers import OnCpu, OnGpu, own_block
from trainer.comm.leaf_sums import Encoder
from trainer.comm.shard_sums import ShardSums
from trainer.comm.timeline.records import BucketRecord, Timeline
from trainer.comm.transport.transport import Transport
from trainer.single_tensor import reduce_scatter_single

Enter = Callable[[str, int], None]
_BUILDS = {Collective.ALL_GATHER: all_gather, Collective.REDUCE_SCATTER: reduce_scatter}


class ShardComm:
    """The collectives of one sharded model; created by `attach`.

    Attributes:
        timeline: what they cost in `one_pass`, and which ranks are waited for.
    """

    def __init__(
        self, model: nn.Module, timeline: Timeline, mover: "OnCpu | OnGpu", defers: bool, enter: Enter
    ) -> None:
        self.timeline = timeline
        self._mover, self._defers, self._enter = mover, defers, enter
        self._in_pass = False
        self.units = [_Unit(self, *unit) for unit in units_of(model)]
        for unit in self.units:
            module: Any = unit.module
            # The base classes that torch annotates are not public; it calls only the methods in them.
            module.set_custom_all_gather(_AllGather(unit))
            module.set_custom_reduce_scatter(_ReduceScatter(unit))

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Around a forward and backward pass: at its end, this rank's gradients are complete."""
        self._in_pass = True
        yield
        self._in_pass = False
        self._mover.finish()
        self.timeline.end_pass()

    def gather(self, unit: "_Unit", buffer: torch.Tensor) -> dist.Work:
        """Begin to fill `buffer` with the blocks of all ranks; it holds this rank's block already."""
        return self._mover.gather(unit.number, buffer, self._record(Collective.ALL_GATHER, unit, buffer))

    def scatter(self, unit: "_Unit", output: torch.Tensor, buffer: torch.Tensor, mean: bool) -> None:
        """Write the sum or mean of this rank's block in all `buffer`s to `output`; overwrites `buffer`."""
        record = self._record(Collective.REDUCE_SCATTER, unit, buffer)
        self._mover.scatter(unit.number, output, buffer, mean, record)
        # torch divides a sum as soon as this returns (fp64 and fp16).
        if not (mean and self._defers and unit.keeps(output)):
            self._mover.finish()

    def close(self) -> None:
        """End the worker thread. On error paths, exit without it."""
        self._mover.close()

    def _record(self, collective: Collective, unit: "_Unit", buffer: torch.Tensor) -> BucketRecord:
        self._enter("all_reduce", unit.number)
        about = {"collective": collective, "unit": unit.name}
        if self._in_pass:
            return self.timeline.arrive(unit.number, buffer.nbytes, is_last=False, **about)  # type: ignore[arg-type]
        return BucketRecord(unit.number, buffer.nbytes, time.perf_counter(), **about)  # type: ignore[arg-type]


class _Unit:
    """A unit of `fully_shard`."""

    def __init__(self, comm: ShardComm, number: int, name: str, module: nn.Module) -> None:
        self.comm, self.number, self.name, self.module = comm, number, name, module
        self._places = own_parameters(module)

    def keeps(self, reduced: torch.Tensor) -> bool:
        """Whether `reduced` becomes the gradients unchanged, and is not read before the pass has ended.

        Otherwise torch at once casts it, adds it to the gradients of an earlier pass, or passes it to hooks.
        """
        parameters = [getattr(part, name) for part, name in self._places]
        return all(
            isinstance(p, DTensor)
            and p.grad is None
            and p.dtype == reduced.dtype
            and p.grad_dtype in (None, reduced.dtype)
            and not p._post_accumulate_grad_hooks  # torch has no public name for it
            for p in parameters
            if p.requires_grad
        )


def units_of(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """The number, the name for users and the module of each unit."""
    units = [(name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    named = [(f"unit {name}" if name else "the root", part) for name, part in units]
    return [(number, name, cast(nn.Module, part)) for number, (name, part) in enumerate(named)]


def own_parameters(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module and the name there of each parameter of a unit, without those of units within."""
    within = [
        m
        for child in unit.modules()
        if child is not unit and isinstance(child, FSDPModule)
        for m in child.modules()
    ]
    own = set(unit.modules()) - set(within)
    return [(part, name) for part in own for name, _ in part.named_parameters(recurse=False)]


class _Comm:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a collective; torch decides how long it lives."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    """The interface of torch's AllGather."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        own = own_block(output_tensor, group)
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        return self._unit.comm.gather(self._unit, output_tensor)


class _ReduceScatter(_Comm):
    """The interface of torch's ReduceScatter; torch does not wait for it, but reads in stream order."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"a reduce-scatter supports SUM and AVG, but not {op}")
        self._unit.comm.scatter(self._unit, output_tensor, input_tensor, op == dist.ReduceOp.AVG)


class _LeafReduceScatter(_Comm):
    """A reduce-scatter of leaves as integers, in place of torch's or _ReduceScatter."""

    def __init__(self, sums: ShardSums) -> None:
        self._sums = sums

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._sums.add(output_tensor, input_tensor, group)


def add_by_leaves(model: nn.Module, comm: ShardComm | None, num_leaves: int) -> list[ShardSums]:
    """Have the gradients of each unit of `model` added as integers, by `comm` or, without, by the backend.

    Args:
        model: as for `attach`, sharded over several ranks, and not hybrid.
    """
    encoder, all_sums = Encoder(num_leaves), []
    units = {unit.number: unit for unit in comm.units} if comm is not None else {}
    for number, name, unit in units_of(model):
        parameters = {getattr(part, of) for part, of in own_parameters(unit)}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        send = reduce_scatter_single if comm is None else partial(_sent_by, comm, units[number])
        sums = ShardSums(name, trained, encoder, send)
        module: Any = unit
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(_LeafReduceScatter(sums))
        all_sums.append(sums)
    return all_sums


def _sent_by(
    comm: ShardComm, unit: _Unit, block: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup
) -> None:
    comm.scatter(unit, block, message, mean=False)


def attach(
    model: nn.Module,
    algorithm: str,
    *,
    group: dist.ProcessGroup,
    hosts: Sequence[int],
    device: torch.device,
    hybrid: bool = False,
    wire_dtype: str = "fp32",
    segment_mb: float | None = None,
    timeout_s: float = 600.0,
    enter: Enter = lambda phase, unit: None,
) -> ShardComm:
    """Have `algorithm` gather and reduce the units of `model`; a collective of the ranks that share shards.

    The mean of gradients is over `group`: each owner divides its sum (with fp16 on the wire each rank divides
    its own gradients). Replicas of a hybrid model use torch's own all-reduce, which cannot be replaced.

    Args:
        model: on which `fully_shard` has been called, with all its units.
        algorithm: one of `trainer.comm.algorithms.gather_scatter.ALL_GATHERS`.
        group: the ranks among which parameters are sharded.
        hosts: host index of every rank, of the world or of the group, in the order of ranks.
        device: where units are gathered; shards may be kept elsewhere.
        hybrid: whether the sums are reduced over replicas next, and so must be complete at once.
        wire_dtype: fp32 | bf16 | fp16, of gradients, which are always added in fp32, and of parameters, which
            every rank, their owner too, uses as they were sent. Half precision is sent unchanged.
        segment_mb: see `Transport`; on a GPU a unit is what a bucket is there.
        timeout_s: the longest wait for a neighbour.
        enter: called with `("all_reduce", unit)` before each collective starts.

    Raises:
        ValueError: an unknown algorithm or wire dtype, or hosts for another number of ranks.
    """
    transport = Transport(group, hosts, device, wire_dtype, segment_mb, timeout_s)
    rank, hosts = transport.rank, transport.hosts
    schedules = {collective: build(algorithm, rank, hosts) for collective, build in _BUILDS.items()}
    mover: OnCpu | OnGpu
    if transport.clock is not None:
        mover = OnGpu(transport.on_gpu(schedules), group, transport.clock)
    else:
        mover = OnCpu(transport.on_cpu(schedules), transport.group, algorithm, transport.timeline)
    return ShardComm(model, transport.timeline, mover, defers=not hybrid, enter=enter)
