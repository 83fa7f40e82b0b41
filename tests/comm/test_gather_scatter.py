"""Every schedule of shards gathers or reduces all blocks, in simulation; a wrong one is caught; bytes are counted."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.traffic import count_traffic
from tests.comm.test_algorithms import EVEN, UNEVEN, without_each_op
from tests.comm.threads import run_threads
from tests.ranks import run_ranks
from trainer.comm.algorithms.gather_scatter import ALL_GATHERS, all_gather, reduce_scatter
from trainer.comm.algorithms.schedule import Collective, Kind, Schedule
from trainer.comm.algorithms.simulate import ScheduleError, simulate
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks

Build = Callable[[str, int, list[int]], Schedule]
BUILDS = {Collective.ALL_GATHER: all_gather, Collective.REDUCE_SCATTER: reduce_scatter}


def family(build: Build, algorithm: str, hosts: list[int]) -> list[Schedule]:
    return [build(algorithm, rank, hosts) for rank in range(len(hosts))]


@pytest.mark.parametrize("collective", BUILDS)
@pytest.mark.parametrize("algorithm", ALL_GATHERS)
def test_worlds_of_1_to_32_on_one_host_and_on_several(algorithm: str, collective: Collective) -> None:
    some = [hosts for hosts in EVEN if len(hosts) <= 16]
    for hosts in [*([0] * world_size for world_size in (*range(1, 18), 32)), *some, *UNEVEN]:
        simulate(family(BUILDS[collective], algorithm, hosts), collective)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALL_GATHERS)
def test_every_world_up_to_64(algorithm: str) -> None:
    for collective, build in BUILDS.items():
        for hosts in [*([0] * world_size for world_size in range(1, 65)), *EVEN]:
            simulate(family(build, algorithm, hosts), collective)


@pytest.mark.parametrize("collective", BUILDS)
@pytest.mark.parametrize(
    "hosts", [[0, 0], [0] * 5, [0, 0, 0, 1, 1]], ids=lambda hosts: "".join(map(str, hosts))
)
def test_one_step_less_or_another_owner_is_caught(hosts: list[int], collective: Collective) -> None:
    for algorithm in ALL_GATHERS:
        whole = family(BUILDS[collective], algorithm, hosts)
        for rank in range(len(hosts)):
            for lacking in without_each_op(whole[rank]):
                with pytest.raises(ScheduleError, match="rank"):
                    simulate([*whole[:rank], lacking, *whole[rank + 1 :]], collective)
        swapped = tuple(reversed(whole[0].blocks))
        with pytest.raises(ScheduleError, match="its block is part"):
            simulate([replace(schedule, blocks=swapped) for schedule in whole], collective)


@pytest.mark.parametrize("build", BUILDS.values())
def test_traffic_is_the_least_there_is(build: Build) -> None:
    """N(P-1)/P per rank; over a host's link the other hosts' blocks, if the algorithm knows hosts."""
    for num_hosts, per_host in ((2, 4), (3, 4), (4, 8)):
        hosts = [rank // per_host for rank in range(num_hosts * per_host)]
        ranks, numel = len(hosts), 1000 * len(hosts)
        count = {a: count_traffic(family(build, a, hosts), hosts, numel, itemsize=1) for a in ALL_GATHERS}
        assert count["ring"].sent == count["hierarchical"].sent == [1000 * (ranks - 1)] * ranks
        assert count["hierarchical"].host_sent == [numel * (num_hosts - 1) // num_hosts] * num_hosts
        assert count["ring"].host_sent == [1000 * (ranks - 1)] * num_hosts
        if ranks.bit_count() == 1:
            assert count["halving_doubling"].sent == count["ring"].sent
            assert count["halving_doubling"].host_sent == count["hierarchical"].host_sent
        assert max(count["master_worker"].sent) == 1000 * (ranks - 1) * (
            ranks - 1 if build is all_gather else 1
        )


@pytest.mark.parametrize("hosts", [[0] * 7, [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1]], ids=len)
def test_traffic_counted_by_phase_equals_traffic_counted_by_round(hosts: list[int]) -> None:
    for algorithm in ALL_GATHERS:
        for build in BUILDS.values():
            schedules = family(build, algorithm, hosts)
            traffic = count_traffic(schedules, hosts, 10 * len(hosts), itemsize=1)
            for rank, schedule in enumerate(schedules):
                moves = [(op.kind, 10 * (op.end - op.begin)) for ops in schedule.rounds() for op in ops]
                assert traffic.sent[rank] == sum(size for kind, size in moves if kind is Kind.SEND)
                assert traffic.received[rank] == sum(size for kind, size in moves if kind is not Kind.SEND)


def gathered_and_scattered(
    links: GlooLinks, hosts: list[int], wires: list[torch.dtype | None], sizes: list[int], segment_bytes: int
) -> int:
    """Every algorithm, dtype and wire; how many collectives were right on this rank."""
    rank, num_right = links.rank, 0
    for algorithm, wire in product(ALL_GATHERS, wires):
        executors = {
            collective: CpuExecutor(
                links, build(algorithm, rank, hosts), hosts, wire, segment_bytes, 2, collective
            )
            for collective, build in BUILDS.items()
        }
        for size, dtype in product(sizes, [torch.float32, torch.bfloat16, torch.uint8]):
            parts = [
                torch.arange(size * len(hosts)).add(r).mul(7 + r).remainder(127).to(dtype)
                for r in range(len(hosts))
            ]
            own = slice(rank * size, (rank + 1) * size)
            bucket = torch.full((size * len(hosts),), 77).to(dtype)  # of the others nothing is known
            bucket[own] = parts[rank][own]
            executors[Collective.ALL_GATHER].run(bucket, number=1)
            whole = torch.cat([parts[r][r * size : (r + 1) * size] for r in range(len(hosts))])
            assert torch.equal(bucket, whole), f"all-gather {algorithm} {hosts} {wire} {size} {dtype}"
            num_right += 1
            if dtype == torch.uint8:
                continue
            bucket = parts[rank].clone()
            executors[Collective.REDUCE_SCATTER].run(bucket, divisor=len(hosts))
            mean = sum(part[own].double() for part in parts) / len(hosts)
            limit = 1e-6 if dtype == torch.float32 and wire is None else 2e-2
            error = (bucket[own] - mean).abs() / 127
            assert size == 0 or error.max() < limit, (
                f"reduce-scatter {algorithm} {hosts} {wire} {size} {dtype}"
            )
            num_right += 1
        for executor in executors.values():
            executor.close()
    return num_right


def by_gloo(*args: Any) -> int:
    return gathered_and_scattered(GlooLinks(dist.new_group(backend="gloo"), 20.0), *args)


def test_real_processes_of_two_hosts() -> None:
    assert run_ranks(by_gloo, 3, [0, 1, 0], [torch.bfloat16], [400], 1 << 10) == [5 * 5] * 3


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([0] * 4, marks=pytest.mark.slow),
        [0, 0, 1],
        pytest.param([0, 0, 0, 1, 1], marks=pytest.mark.slow),
    ],
    ids=lambda hosts: "".join(map(str, hosts)),
)
def test_every_algorithm_dtype_and_wire(hosts: list[int]) -> None:
    wires = [None, torch.bfloat16, torch.float16]
    counts = run_threads(gathered_and_scattered, len(hosts), hosts, wires, [0, 1, 7, 30_011], 1 << 14)
    assert counts == [5 * 3 * 4 * 5] * len(hosts)


def test_unknown_names_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"butterfly.*ring"):
        all_gather("butterfly", 0, [0])
    with pytest.raises(ValueError, match="rank 2"):
        reduce_scatter("ring", 2, [0, 0])
