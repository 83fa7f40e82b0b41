"""Real processes: every algorithm gives every rank the same bits of the right sum, whatever the bucket."""

import zlib
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks
from trainer.comm.execution import mailbox
from trainer.comm.execution.blame import PeerError
from trainer.comm.execution.executor import CpuExecutor
from trainer.comm.schedules.algorithms import ALGORITHMS, build

SHAPES = [[0], [0, 0], [0, 0, 0], [0] * 4, [0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]
SIZES = [0, 1, 7, 1000, 200_003]  # the last in 13 to 25 segments of 64 KiB
WIRES = [None, torch.bfloat16, torch.float16]
# Relative to the sum of magnitudes: some roundings of the coarsest dtype on the way; a lost rank is 1/6.
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` contributes: distinct from rank to rank and from element to element."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * (0.37 + rank) + rank).to(dtype)


def check(algorithms: Sequence[str], hosts: list[int], sizes: Sequence[int], segment_bytes: int) -> int:
    """All dtypes over all wires; the number of all-reduces that were right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    executors = {
        (algorithm, wire): CpuExecutor(
            group, build(algorithm, rank, hosts), hosts, wire, segment_bytes, timeout_s=20.0
        )
        for algorithm in algorithms
        for wire in WIRES
    }
    num_right = 0
    for numel, dtype in product(sizes, TOLERANCE):
        parts = [values(r, numel, dtype) for r in range(world_size)]
        mean = sum(part.double() / world_size for part in parts)
        magnitude = sum(part.double().abs() / world_size for part in parts).clamp(min=1e-3)
        hashes: dict[str, int] = {}
        for (algorithm, wire), executor in executors.items():
            bucket = parts[rank].clone()
            executor.run(bucket, divisor=world_size)
            tolerance = max(TOLERANCE[dtype], TOLERANCE.get(wire, 0.0) if world_size > 1 else 0.0)
            error = (bucket.double() - mean).abs() / magnitude
            case = f"{algorithm=} {wire=} {numel=} {dtype=}"
            assert numel == 0 or error.max() <= tolerance, f"{case}: {error.max()} at {error.argmax()}"
            hashes[case] = zlib.crc32(bucket.view(torch.uint8).numpy())
            num_right += 1
        of_all: list[dict[str, int]] = [{}] * world_size
        dist.all_gather_object(of_all, hashes)
        for case, mine in hashes.items():
            assert {theirs[case] for theirs in of_all} == {mine}, f"{case}: ranks hold different bits"
    for executor in executors.values():
        executor.close()
    return num_right


def check_small_and_large(hosts: list[int]) -> list[int]:
    names = list(ALGORITHMS)
    return [check(names, hosts, SIZES[:-1], 1 << 10), check(names, hosts, SIZES[-1:], 1 << 16)]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", SHAPES, ids=lambda hosts: "".join(map(str, hosts)))
def test_small_and_large_buckets(hosts: list[int]) -> None:
    of_a_size = len(ALGORITHMS) * len(WIRES) * len(TOLERANCE)
    counts = run_ranks(check_small_and_large, len(hosts), hosts)
    assert counts == [[4 * of_a_size, of_a_size]] * len(hosts)


def check_without_shared_memory(hosts: list[int]) -> int:
    mailbox.AVAILABLE = False
    return check(list(ALGORITHMS), hosts, [1000], 1 << 10)


@pytest.mark.slow
def test_gloo_serves_within_the_host_where_there_is_no_shared_memory() -> None:
    assert run_ranks(check_without_shared_memory, 3, [0, 0, 0]) == [len(ALGORITHMS) * len(WIRES) * 4] * 3


def average_large_numbers(hosts: list[int]) -> torch.Tensor:
    executor = CpuExecutor(
        dist.new_group(backend="gloo"), build("ring", dist.get_rank(), hosts), hosts, torch.float16
    )
    bucket = torch.full((100,), 30_000.0)
    executor.run(bucket, divisor=len(hosts))
    executor.close()
    return bucket


def test_sums_do_not_overflow_on_an_fp16_wire() -> None:
    for mean in run_ranks(average_large_numbers, 4, [0, 0, 1, 1]):
        assert torch.equal(mean, torch.full((100,), 30_000.0))


def sum_without(deaf: int, hosts: list[int]) -> None:
    """Rank `deaf` forgets to add what it receives."""
    if dist.get_rank() == deaf:
        torch.Tensor.add_ = lambda self, other: self  # type: ignore[method-assign,assignment]
    check(["ring"], hosts, [1000], 1 << 10)


def test_a_rank_that_does_not_add_is_caught() -> None:
    with pytest.raises(RankFailure, match="numel=1000"):
        run_ranks(sum_without, 3, 1, [0, 0, 1])


def disagree(hosts: list[int]) -> str:
    """Rank 1 comes with one element less."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    executor = CpuExecutor(group, build("ring", rank, hosts), hosts, timeout_s=10.0)
    executor.run(torch.ones(100))
    try:
        executor.run(torch.ones(99 if rank == 1 else 98))
    except PeerError as error:
        return f"{error.peer}: {error}"
    return "no error"


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_ranks_with_buckets_of_different_lengths_say_so(hosts: list[int]) -> None:
    first, second = run_ranks(disagree, 2, hosts)
    assert first.startswith("1: rank 1 has a bucket of 99 x torch.float32")
    assert second.startswith("0: rank 0 has a bucket of 98 x torch.float32")


def disagree_on_known_layouts(hosts: list[int]) -> str:
    """Both lengths were used before; then rank 1 takes the wrong one."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    executor = CpuExecutor(group, build("ring", rank, hosts), hosts, timeout_s=6.0)
    for numel in (100, 200):
        executor.run(torch.ones(numel))
    try:
        executor.run(torch.ones(200 if rank == 1 else 100))
    except PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_no_garbage_is_added_where_lengths_are_mixed_up() -> None:
    for text in run_ranks(disagree_on_known_layouts, 2, [0, 0]):
        assert "another length or dtype" in text or "closed its connection" in text
    for text in run_ranks(disagree_on_known_layouts, 2, [0, 1]):
        assert "did not answer within 6 s" in text or "is gone" in text


def refuse_integers() -> None:
    executor = CpuExecutor(dist.new_group(backend="gloo"), build("ring", 0, [0]), [0])
    with pytest.raises(ValueError, match=r"int64.*fp32"):
        executor.run(torch.ones(3, dtype=torch.int64))


def test_integers_are_refused() -> None:
    run_ranks(refuse_integers, 1)
