"""Every algorithm gives every rank the same bits of the right sum, for any bucket."""

import os
import socket
import tempfile
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.threads import run_threads
from tests.ranks import RankFailure, run_ranks
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.transport import mailbox
from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks

SHAPES = [[0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]
QUICK = SHAPES[:1]
SIZES = [0, 1, 7, 1000, 200_003]  # the last in 13 to 25 segments of 64 KiB
WIRES = [None, torch.bfloat16, torch.float16]
# Relative to the sum of magnitudes: some roundings of the coarsest dtype on the way; a lost rank is 1/6.
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The contribution of `rank`: distinct for each rank and element."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * (0.37 + rank) + rank).to(dtype)


def check(
    links: GlooLinks, algorithms: Sequence[str], hosts: list[int], sizes: Sequence[int], segment_bytes: int
) -> dict[str, int]:
    """All dtypes with all wire dtypes: the hash of this rank's result, by case; rank 0 checks the result."""
    executors = {
        (algorithm, wire): CpuExecutor(links, build(algorithm, links.rank, hosts), hosts, wire, segment_bytes)
        for algorithm in algorithms
        for wire in WIRES
    }
    world_size, hashes = len(hosts), {}
    for numel, dtype in product(sizes, TOLERANCE):
        if links.rank == 0:
            parts = [values(r, numel, dtype).double() / world_size for r in range(world_size)]
            mean = torch.stack(parts).sum(0)
            magnitude = torch.stack(parts).abs().sum(0).clamp(min=1e-3)
        for (algorithm, wire), executor in executors.items():
            bucket = values(links.rank, numel, dtype)
            executor.run(bucket, divisor=world_size)
            case = f"{algorithm=} {wire=} {numel=} {dtype=}"
            if links.rank == 0:
                tolerance = max(TOLERANCE[dtype], TOLERANCE.get(wire, 0.0) if world_size > 1 else 0.0)
                error = (bucket.double() - mean).abs() / magnitude
                assert numel == 0 or error.max() <= tolerance, f"{case}: {error.max()} at {error.argmax()}"
            hashes[case] = zlib.crc32(bucket.view(torch.uint8).numpy())
    for executor in executors.values():
        executor.close()
    return hashes


def same_bits(hashes: list[dict[str, int]]) -> int:
    """The number of all-reduces after which all ranks held the same bits, which is that of all."""
    for case in hashes[0]:
        assert {theirs[case] for theirs in hashes} == {hashes[0][case]}, f"{case}: ranks hold different bits"
    return len(hashes[0])


OF_A_SIZE = len(ALGORITHMS) * len(WIRES) * len(TOLERANCE)


@pytest.mark.parametrize(
    "hosts",
    [pytest.param(hosts, marks=[pytest.mark.slow] * (hosts not in QUICK)) for hosts in SHAPES],
    ids=lambda hosts: "".join(map(str, hosts)),
)
def test_small_and_large_buckets(hosts: list[int]) -> None:
    small, large = SIZES[:-1], SIZES[-1:]
    assert same_bits(run_threads(check, len(hosts), ALGORITHMS, hosts, small, 1 << 10)) == 4 * OF_A_SIZE
    assert same_bits(run_threads(check, len(hosts), ALGORITHMS, hosts, large, 1 << 16)) == OF_A_SIZE


def check_by_gloo(hosts: list[int], sizes: list[int]) -> dict[str, int]:
    return check(GlooLinks(dist.new_group(backend="gloo"), 20.0), list(ALGORITHMS), hosts, sizes, 1 << 16)


@pytest.mark.slow
def test_real_processes_on_two_hosts() -> None:
    hosts = [0, 0, 1, 1]
    assert same_bits(run_ranks(check_by_gloo, 4, hosts, [7, 200_003])) == 2 * OF_A_SIZE


def first_messages(folder: str) -> tuple[int, list[int]]:
    """The other rank's message, with a TMPDIR longer than a socket's path can be; and the exit status of strangers."""
    tempfile.tempdir = folder
    rank, strangers = dist.get_rank(), list[int]()

    def exchange(address: str) -> list[str]:
        """A process of another user connects before the other rank can."""
        if os.getuid() == 0:
            if (pid := os.fork()) == 0:
                os.setuid(65534)
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.connect(address)
                stranger.send(b"nobody")
                os._exit(0)
            strangers.append(os.waitpid(pid, 0)[1])
        addresses = ["", ""]
        dist.all_gather_object(addresses, address)
        return addresses

    outbox = mailbox.Outbox(1, 1)
    box = mailbox.open_mailboxes(rank, [1 - rank], [1 - rank], outbox, 1, exchange, 20.0)[1 - rank]
    slot, _ = outbox.put(torch.tensor([rank + 1]), torch.uint8)
    box.send(slot, 1, tag=7)
    return int(box.receive(1, tag=7)), strangers


def test_a_long_tmpdir_and_strangers_are_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    strangers = [0] if os.getuid() == 0 else []
    assert run_ranks(first_messages, 2, str(folder)) == [(2, strangers), (1, strangers)]


def average_large_numbers(links: GlooLinks, hosts: list[int]) -> torch.Tensor:
    executor = CpuExecutor(links, build("ring", links.rank, hosts), hosts, torch.float16)
    bucket = torch.full((100,), 30_000.0)
    executor.run(bucket, divisor=len(hosts))
    executor.close()
    return bucket


def test_sums_do_not_overflow_on_an_fp16_wire() -> None:
    for mean in run_threads(average_large_numbers, 4, [0, 0, 1, 1]):
        assert torch.equal(mean, torch.full((100,), 30_000.0))


def sum_without(deaf: int, hosts: list[int]) -> None:
    """Rank `deaf` forgets to add what it receives."""
    if dist.get_rank() == deaf:
        torch.Tensor.add_ = lambda self, other: self  # type: ignore[method-assign,assignment]
    check(GlooLinks(dist.new_group(backend="gloo"), 20.0), ["ring"], hosts, [1000], 1 << 10)


def test_a_rank_that_does_not_add_is_caught() -> None:
    with pytest.raises(RankFailure, match="numel=1000"):
        run_ranks(sum_without, 3, 1, [0, 0, 1])


def disagree(hosts: list[int]) -> str:
    """Rank 1 comes with one element less."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    executor = CpuExecutor(GlooLinks(group, 10.0), build("ring", rank, hosts), hosts)
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
    executor = CpuExecutor(GlooLinks(group, 2.0), build("ring", rank, hosts), hosts)
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
        assert "did not answer within 2 s" in text or "is gone" in text


def refuse_small_integers(links: GlooLinks) -> None:
    executor = CpuExecutor(links, build("ring", 0, [0]), [0])
    with pytest.raises(ValueError, match=r"int32.*fp32"):
        executor.run(torch.ones(3, dtype=torch.int32))


def test_integers_other_than_those_of_exact_runs_are_refused() -> None:
    run_threads(refuse_small_integers, 1)
