"""Two hosts with their own links: the real traffic over them, counted by their interfaces."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.traffic import count_traffic
from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import build
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


def measure(algorithms: list[str], interface: str) -> dict[str, tuple[float, float]]:
    """Bytes per all-reduce over this host's link."""
    found = {}
    group = dist.new_group(backend="gloo")
    for algorithm in algorithms:
        executor = CpuExecutor(GlooLinks(group), build(algorithm, dist.get_rank(), HOSTS), HOSTS)
        bucket = torch.ones(NUMEL)
        executor.run(bucket)  # layouts are compared once
        sent, received = quiet_link_bytes(interface)
        for _ in range(REPEAT):
            executor.run(bucket)
        sent_after, received_after = quiet_link_bytes(interface)
        found[algorithm] = ((sent_after - sent) / REPEAT, (received_after - received) / REPEAT)
        executor.close()
    return found


@pytest.mark.slow
@pytest.mark.netns
def test_links_carry_what_the_schedules_say() -> None:
    algorithms = ["ring", "hierarchical"]
    with network(2) as (first, second):
        places = [first, first, second, second]
        results = run_ranks(measure, 4, algorithms, first.interface, hosts=places)
    for algorithm in algorithms:
        schedules = [build(algorithm, rank, HOSTS) for rank in range(4)]
        traffic = count_traffic(schedules, HOSTS, NUMEL, itemsize=4)
        for rank, host in enumerate(HOSTS):
            sent, received = (
                measured / counted[host]
                for measured, counted in zip(
                    results[rank][algorithm],
                    (traffic.host_sent, traffic.host_received),
                    strict=True,
                )
            )
            print(f"{algorithm} host {host}: {sent:.4f} of the bytes counted")
            assert 1.0 <= sent < 1.12
            assert 1.0 <= received < 1.12
