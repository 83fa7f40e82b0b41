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

from tests.ranks import RankFailure, run_ranks
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.transport import mailbox
from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks

WIRES = [None, torch.bfloat16, torch.float16]
# Relative to the sum of magnitudes: some roundings of the coarsest dtype on the way; a lost rank is 1/6.
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The contribution of `rank`: distinct for each rank and element."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * (0.37 + rank) + rank).to(dtype)


def check(algorithms: Sequence[str], hosts: list[int], sizes: Sequence[int]) -> dict[str, int]:
    """All dtypes with all wire dtypes: the hash of this rank's result, by case; rank 0 checks the result."""
    links = GlooLinks(dist.new_group(backend="gloo"), 20.0)
    executors = {
        (algorithm, wire): CpuExecutor(links, build(algorithm, links.rank, hosts), hosts, wire, 1 << 16)
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


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        ([0, 0, 0], [0, 7, 1000]),
        # The last in 13 to 25 segments of 64 KiB.
        pytest.param([0, 0, 1, 1], [1, 200_003], marks=pytest.mark.slow),
        pytest.param([0, 0, 0, 1], [7, 200_003], marks=pytest.mark.slow),
    ],
    ids=lambda value: "".join(map(str, value)) if len(value) > 2 else None,
)
def test_all_ranks_have_the_same_bits_of_the_right_sum(hosts: list[int], sizes: list[int]) -> None:
    hashes = run_ranks(check, len(hosts), list(ALGORITHMS), hosts, sizes)
    assert len(hashes[0]) == len(sizes) * len(ALGORITHMS) * len(WIRES) * len(TOLERANCE)
    for case in hashes[0]:
        assert {theirs[case] for theirs in hashes} == {hashes[0][case]}, f"{case}: ranks hold different bits"


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


def average_large_numbers(hosts: list[int]) -> torch.Tensor:
    executor = _ring(hosts, torch.float16)
    bucket = torch.full((100,), 30_000.0)
    executor.run(bucket, divisor=len(hosts))
    executor.close()
    return bucket


def _ring(hosts: list[int], wire: torch.dtype | None = None, timeout_s: float = 10.0) -> CpuExecutor:
    links = GlooLinks(dist.new_group(backend="gloo"), timeout_s)
    return CpuExecutor(links, build("ring", links.rank, hosts), hosts, wire)


def test_sums_do_not_overflow_on_an_fp16_wire() -> None:
    for mean in run_ranks(average_large_numbers, 3, [0, 0, 1]):
        assert torch.equal(mean, torch.full((100,), 30_000.0))


def sum_without(deaf: int, hosts: list[int]) -> None:
    """Rank `deaf` forgets to add what it receives."""
    if dist.get_rank() == deaf:
        torch.Tensor.add_ = lambda self, other: self  # type: ignore[method-assign,assignment]
    check(["ring"], hosts, [1000])


def test_a_rank_that_does_not_add_is_caught() -> None:
    with pytest.raises(RankFailure, match="numel=1000"):
        run_ranks(sum_without, 3, 1, [0, 0, 1])


def disagree(hosts: list[int], earlier: list[int], timeout_s: float) -> str:
    """What is said where rank 1 comes with 99 elements and rank 0 with 98, after buckets of `earlier`."""
    executor = _ring(hosts, timeout_s=timeout_s)
    for numel in earlier:
        executor.run(torch.ones(numel))
    try:
        executor.run(torch.ones(98 + dist.get_rank()))
    except PeerError as error:
        return f"{error.peer}: {error}"
    return "no error"


def test_ranks_with_buckets_of_different_lengths_say_so() -> None:
    first, second = run_ranks(disagree, 2, [0, 1], [100], 10.0)
    assert first.startswith("1: rank 1 has a bucket of 99 x torch.float32")
    assert second.startswith("0: rank 0 has a bucket of 98 x torch.float32")


@pytest.mark.slow
def test_no_garbage_is_added_where_known_lengths_are_mixed_up() -> None:
    for text in run_ranks(disagree, 2, [0, 0], [98, 99], 2.0):
        assert "another length or dtype" in text or "closed its connection" in text
    for text in run_ranks(disagree, 2, [0, 1], [98, 99], 2.0):
        assert "did not answer within 2 s" in text or "is gone" in text


def refuse_small_integers() -> None:
    with pytest.raises(ValueError, match=r"int32.*fp32"):
        _ring([0]).run(torch.ones(3, dtype=torch.int32))


def test_integers_other_than_those_of_exact_runs_are_refused() -> None:
    run_ranks(refuse_small_integers, 1)
