"""Every algorithm gives every rank the same bits of the right sum, for any bucket."""

import tempfile
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer import accelerator
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.executor import Executor

WIRES = [None, torch.bfloat16, torch.float16]
# Relative to the sum of magnitudes: some roundings in the coarsest dtype; a lost rank makes 1/6.
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data of `rank`, which differs for each rank and element."""
    return torch.sin(torch.arange(numel, dtype=torch.float32) * (0.37 + rank) + rank).to(dtype)


def executor_of(
    algorithm: str, hosts: list[int], wire: torch.dtype | None = None, segment_mb: float | None = None
) -> Executor:
    group = dist.new_group(backend="gloo")
    schedule = build(algorithm, dist.get_rank(), hosts)
    return Executor(group, schedule, torch.device("cpu"), wire, segment_mb, hosts=hosts, timeout_s=20.0)


def check(algorithms: Sequence[str], hosts: list[int], sizes: Sequence[int]) -> dict[str, int]:
    """Return the hash of this rank's result for each dtype and wire dtype; rank 0 checks the result."""
    executors = {
        (algorithm, wire): executor_of(algorithm, hosts, wire, 1 / 16)
        for algorithm in algorithms
        for wire in WIRES
    }
    rank, world_size, hashes = dist.get_rank(), len(hosts), {}
    for numel, dtype in product(sizes, TOLERANCE):
        if rank == 0:
            parts = [values(r, numel, dtype).double() / world_size for r in range(world_size)]
            mean = torch.stack(parts).sum(0)
            magnitude = torch.stack(parts).abs().sum(0).clamp(min=1e-3)
        for (algorithm, wire), executor in executors.items():
            bucket = values(rank, numel, dtype)
            executor.run(bucket, divisor=world_size)
            case = f"{algorithm=} {wire=} {numel=} {dtype=}"
            if rank == 0:
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
def test_the_sum_is_right_and_bit_identical_on_all_ranks(hosts: list[int], sizes: list[int]) -> None:
    hashes = run_ranks(check, len(hosts), list(ALGORITHMS), hosts, sizes)
    assert len(hashes[0]) == len(sizes) * len(ALGORITHMS) * len(WIRES) * len(TOLERANCE)
    for case in hashes[0]:
        assert {theirs[case] for theirs in hashes} == {hashes[0][case]}, f"{case}: ranks hold different bits"


def first_sum(folder: str) -> list[float]:
    """Run with a TMPDIR that is too long for the path of a socket."""
    tempfile.tempdir = folder
    executor = executor_of("tree", [0, 0])
    bucket = torch.full((3,), 1.0 + dist.get_rank())
    executor.run(bucket)
    executor.close()
    return bucket.tolist()


def test_a_long_tmpdir_is_supported(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    assert run_ranks(first_sum, 2, str(folder)) == [[3.0] * 3] * 2


class OneWork:
    """The single Work that NCCL returns for a group of messages."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def check_as_on_gpus(hosts: list[int], sizes: list[int]) -> dict[str, int]:
    """Run `check` with gloo, and messages grouped as for NCCL."""
    batch = dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "is_accelerator", lambda device: True)
        patch.setattr(dist, "batch_isend_irecv", lambda messages: [OneWork(batch(messages))])
        return check(list(ALGORITHMS), hosts, sizes)


@pytest.mark.slow
def test_with_messages_grouped_for_nccl_the_sum_is_right_and_identical() -> None:
    hashes = run_ranks(check_as_on_gpus, 3, [0, 0, 1], [7, 50_003])
    for case in hashes[0]:
        assert {theirs[case] for theirs in hashes} == {hashes[0][case]}, f"{case}: ranks hold different bits"


def average_large_numbers(hosts: list[int]) -> torch.Tensor:
    executor = executor_of("ring", hosts, torch.float16)
    bucket = torch.full((100,), 30_000.0)
    executor.run(bucket, divisor=len(hosts))
    executor.close()
    return bucket


def test_sums_do_not_overflow_on_an_fp16_wire() -> None:
    for mean in run_ranks(average_large_numbers, 3, [0, 0, 1]):
        assert torch.equal(mean, torch.full((100,), 30_000.0))


def refuse_small_integers() -> None:
    with pytest.raises(ValueError, match=r"int32.*fp32"):
        executor_of("ring", [0]).run(torch.ones(3, dtype=torch.int32))


def test_integer_dtypes_other_than_those_of_exact_are_refused() -> None:
    run_ranks(refuse_small_integers, 1)
