"""Runs a schedule among the ranks that share a model: with an executor on CPUs, NCCL on GPUs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.comm.algorithms.pipeline import SEGMENT_MB
from trainer.comm.algorithms.schedule import Schedule
from trainer.comm.timeline import GpuClock, Timeline
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks
from trainer.comm.transport.members import WIRE_DTYPES, hosts_of_members, new_group
from trainer.comm.transport.nccl import NcclReducer


class Transport:
    """Groups, clock and timeline of one model's communication; created by all ranks of `like` (a collective).

    Args:
        like: a group of the ranks that share the model.
        hosts: host index of every rank, of the world or of the group, in the order of ranks.
        device: where the buckets are.
        wire_dtype: fp32 | bf16 | fp16.
        segment_mb: MiB per segment of the pipeline. None: 2 on a CPU, a whole bucket on a GPU, where each
            segment costs the host more than it gains.
        timeout_s: the longest wait for a neighbour.

    Attributes:
        group: a gloo group of these ranks that has no other user.
        clock: of the GPU; None on a CPU.

    Raises:
        ValueError: an unknown wire dtype, or hosts for another number of ranks.
    """

    def __init__(
        self,
        like: dist.ProcessGroup,
        hosts: Sequence[int],
        device: torch.device,
        wire_dtype: str,
        segment_mb: float | None,
        timeout_s: float,
    ) -> None:
        if wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"unknown wire dtype {wire_dtype!r}; choose from {', '.join(WIRE_DTYPES)}")
        self.wire, self.hosts = WIRE_DTYPES[wire_dtype], hosts_of_members(like, hosts)
        self._like, self._segment_mb, self._timeout_s = like, segment_mb, timeout_s
        self.group = new_group(like, "gloo", timeout_s)
        self.rank = dist.get_rank(self.group)
        self.clock = GpuClock(device) if device.type == "cuda" else None
        self.timeline = Timeline(self.group, self.clock)

    def on_cpu(self, schedule: Schedule) -> CpuExecutor:
        segment_bytes = int((self._segment_mb or SEGMENT_MB) * 2**20)
        links = GlooLinks(self.group, self._timeout_s)
        return CpuExecutor(links, schedule, self.hosts, self.wire, segment_bytes)

    def on_gpu(self, schedule: Schedule) -> NcclReducer:
        assert self.clock is not None
        nccl = new_group(self._like, "nccl", self._timeout_s)
        segment_bytes = None if self._segment_mb is None else int(self._segment_mb * 2**20)
        links = GlooLinks(self.group, self._timeout_s)
        return NcclReducer(nccl, links, schedule, self.clock, self.wire, segment_bytes)
