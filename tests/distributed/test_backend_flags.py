"""Freed memory that the C library does not return."""

import ctypes
from pathlib import Path

import torch

from tests.ranks import run_ranks
from trainer.distributed.backend_flags import return_large_blocks


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _kept() -> int:
    """Return the bytes that stay resident after 64 blocks of 2 MiB are freed. A block of 256 KiB, too large
    for the gaps of a new process, stays allocated after each of them.
    """
    before = _resident()
    blocks, living = [], []
    for _ in range(64):
        blocks.append(torch.ones(1 << 19))
        living.append(torch.ones(1 << 16))
    blocks.clear()
    return _resident() - before - 64 * (1 << 18)


def _both(rank: int) -> tuple[int, int]:
    ctypes.CDLL(None).mallopt(-3, 32 << 20)  # glibc's maximum threshold
    by_itself = _kept()
    return_large_blocks(torch.device("cpu"))
    return by_itself, _kept()


def test_freed_blocks_go_back_to_the_system(tmp_path: Path) -> None:
    by_itself, returned = run_ranks(_both, 1, tmp_path, init=False)[0]
    assert by_itself > 20 << 20
    assert returned < 10 << 20
