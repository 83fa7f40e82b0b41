"""In simulation, schedules are all-reduces with the traffic of textbooks, and wrong ones are detected."""

from dataclasses import replace

import pytest

from planner.formulas import CLASSIC
from planner.traffic import count_traffic
from tests.comm.proof import ScheduleError, simulate
from trainer.comm.algorithms.all_reduce import ALGORITHMS, Kind, Op, Phase, Schedule, build
from trainer.comm.algorithms.pipeline import IN_FLIGHT, sweeps
from trainer.config.overrides import CONF
from trainer.config.schema import COMMS, SCHEDULES

UNEVEN = [[0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 0, 1], [1, 0, 2, 0, 1], [0, 0, 0, 1, 1, 2]]
EVEN = [[rank // size for rank in range(num * size)] for num in (2, 3, 4, 5) for size in (1, 2, 3, 4, 8)]


def family(algorithm: str, hosts: list[int]) -> list[Schedule]:
    return [build(algorithm, rank, hosts) for rank in range(len(hosts))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_right_for_any_world_size_and_shape(algorithm: str) -> None:
    for hosts in [*([0] * size for size in (*range(1, 18), 32)), *EVEN, *UNEVEN]:
        simulate(family(algorithm, hosts))


def test_each_algorithm_is_in_every_list_of_names() -> None:
    assert set(ALGORITHMS) == set(SCHEDULES) == set(CLASSIC)
    assert set(COMMS) == {file.stem for file in (CONF / "comm").glob("*.yaml")}


def without_each_op(schedule: Schedule) -> list[Schedule]:
    """Yield copies of the schedule with unrolled phases, each without one op."""
    rounds = list(schedule.rounds())
    lacking = []
    for number, ops in enumerate(rounds):
        for op in ops:
            left = [*rounds[:number], tuple(o for o in ops if o is not op), *rounds[number + 1 :]]
            phases = tuple(Phase(ops) for ops in left)
            split = schedule.num_reduce_rounds
            lacking.append(replace(schedule, reduce=phases[:split], gather=phases[split:]))
    return lacking


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]])
def test_a_schedule_without_any_one_step_is_detected(algorithm: str, hosts: list[int]) -> None:
    whole = family(algorithm, hosts)
    for rank in range(len(hosts)):
        for lacking in without_each_op(whole[rank]):
            with pytest.raises(ScheduleError, match="rank"):
                simulate([*whole[:rank], lacking, *whole[rank + 1 :]])


def test_wrong_sums_are_detected() -> None:
    swap = [
        Schedule(1, (Phase((Op(Kind.SEND, 1 - r, 0, 1), Op(Kind.ADD, 1 - r, 0, 1))),), (0, 1), ())
        for r in (0, 1)
    ]
    with pytest.raises(ScheduleError, match="adds to what it has sent"):
        simulate(swap)
    twice = Phase((Op(Kind.SEND, 1, 0, 1), Op(Kind.SEND, 1, 0, 1)))
    receive = Phase((Op(Kind.ADD, 0, 0, 1), Op(Kind.ADD, 0, 0, 1)))
    with pytest.raises(ScheduleError, match="added twice"):
        simulate([Schedule(1, (twice,), (0, 0), ()), Schedule(1, (receive,), (0, 1), ())])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hosts", [[0] * 7, [0, 0, 0, 1]])
def test_traffic_counted_by_phase_equals_traffic_counted_by_round(algorithm: str, hosts: list[int]) -> None:
    schedules = family(algorithm, hosts)
    for numel in (0, 7, 100_003):
        traffic = count_traffic(schedules, hosts, numel, itemsize=4)
        for rank, schedule in enumerate(schedules):
            chunks = [
                (op.kind, 4 * (schedule.boundary(op.end, numel) - schedule.boundary(op.begin, numel)))
                for ops in schedule.rounds()
                for op in ops
            ]
            assert traffic.sent[rank] == sum(size for kind, size in chunks if kind is Kind.SEND)
            assert traffic.received[rank] == sum(size for kind, size in chunks if kind is not Kind.SEND)


@pytest.mark.parametrize(("num_hosts", "per_host"), [(2, 2), (4, 8)])
def test_traffic_on_host_links_equals_the_formulas(num_hosts: int, per_host: int) -> None:
    hosts = [rank // per_host for rank in range(num_hosts * per_host)]
    world_size, numel = len(hosts), 1000 * num_hosts * per_host

    def host_sent(algorithm: str) -> list[int]:
        return count_traffic(family(algorithm, hosts), hosts, numel, itemsize=1).host_sent

    assert host_sent("ring") == [2 * numel * (world_size - 1) // world_size] * num_hosts
    assert host_sent("hierarchical") == [2 * numel * (num_hosts - 1) // num_hosts] * num_hosts
    assert sum(host_sent("tree")) == 2 * numel * (num_hosts - 1)
    assert host_sent("master_worker") == [(world_size - per_host) * numel] + [per_host * numel] * (
        num_hosts - 1
    )


@pytest.mark.parametrize("num_segments", [0, 1, 5, 3 * IN_FLIGHT + 1])
@pytest.mark.parametrize("num_rounds", [4, 2 * IN_FLIGHT])
@pytest.mark.parametrize("width", [1, 3, 2 * IN_FLIGHT])
def test_every_segment_goes_through_all_steps_in_order(
    num_segments: int, num_rounds: int, width: int
) -> None:
    made = list(sweeps(num_segments, num_rounds, width))
    order = [visit for sweep in made for visit in sweep]
    assert sorted(order) == [(segment, k) for segment in range(num_segments) for k in range(num_rounds + 1)]
    for segment in range(num_segments):
        assert [k for s, k in order if s == segment] == list(range(num_rounds + 1))
    assert all(0 < len(sweep) <= IN_FLIGHT and sweep == sorted(sweep) for sweep in made)
    assert all(sum(k == 0 for _, k in sweep) <= width for sweep in made)
