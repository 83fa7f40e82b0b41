"""Two hosts with their own links: the real traffic over them, counted by their interfaces."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.traffic import count_traffic
from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.algorithms.gather_scatter import all_gather, reduce_scatter
from trainer.comm.algorithms.schedule import Collective
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks

HOSTS = [0, 0, 1, 1]
NUMEL = 4 << 20
REPEAT = 3


def quiet_link_bytes(interface: str) -> tuple[int, int]:
    """Bytes (sent, received) by this process's host so far, headers included, while no rank sends."""
    dist.barrier()
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith(f"{interface}:"))
    dist.barrier()
    return int(fields[9]), int(fields[1])


Case = tuple[Collective, str]  # and the algorithm
BUILDS = {
    Collective.ALL_REDUCE: build,
    Collective.ALL_GATHER: all_gather,
    Collective.REDUCE_SCATTER: reduce_scatter,
}


def measure(cases: list[Case], interface: str) -> dict[Case, tuple[float, float]]:
    """Bytes per collective over this host's link."""
    found = {}
    group = dist.new_group(backend="gloo")
    for collective, algorithm in cases:
        schedule = BUILDS[collective](algorithm, dist.get_rank(), HOSTS)
        executor = CpuExecutor(GlooLinks(group), schedule, HOSTS, collective=collective)
        bucket = torch.ones(NUMEL)
        executor.run(bucket)  # layouts are compared once
        sent, received = quiet_link_bytes(interface)
        for _ in range(REPEAT):
            executor.run(bucket)
        sent_after, received_after = quiet_link_bytes(interface)
        found[collective, algorithm] = ((sent_after - sent) / REPEAT, (received_after - received) / REPEAT)
        executor.close()
    return found


@pytest.mark.slow
@pytest.mark.netns
def test_links_carry_what_the_schedules_say() -> None:
    cases = [(Collective.ALL_REDUCE, name) for name in ("ring", "tree", "hierarchical", "master_worker")]
    cases += list(product((Collective.ALL_GATHER, Collective.REDUCE_SCATTER), ("ring", "hierarchical")))
    with network(2) as (first, second):
        places = [first, first, second, second]
        results = run_ranks(measure, 4, cases, first.interface, hosts=places)
    for collective, algorithm in cases:
        schedules = [BUILDS[collective](algorithm, rank, HOSTS) for rank in range(4)]
        traffic = count_traffic(schedules, HOSTS, NUMEL, itemsize=4)
        for rank, host in enumerate(HOSTS):
            sent, received = (
                measured / counted[host]
                for measured, counted in zip(
                    results[rank][collective, algorithm],
                    (traffic.host_sent, traffic.host_received),
                    strict=True,
                )
            )
            print(f"{collective.value} {algorithm} host {host}: {sent:.4f} of the bytes counted")
            assert 1.0 <= sent < 1.12
            assert 1.0 <= received < 1.12
