"""Whole runs, stopped at every step: what follows is, bit by bit, what would have followed without it."""

from pathlib import Path

import pytest
import torch

from tests import runs
from tests.checkpoint.whole_runs import DDP, FP16, FSDP, LAST_STEP, SINGLE, differences, run
from tests.ranks import run_ranks
from trainer import loop
from trainer.distributed import process_group

SHARDED, WORKERS, ACCUMULATING = "checkpoint=sharded", "data.num_workers=2", "train.micro_batch_size=2"
CONFIGURATIONS = {
    "single": (1, SINGLE),
    "single-workers-fp16": (1, (*SINGLE, *FP16, WORKERS)),
    "ddp-2": (2, DDP),
    "ddp-2-workers-fp16-async": (2, (*DDP, *FP16, WORKERS, "checkpoint.async=true")),
    "ddp-3": (3, DDP),
    "ddp-3-sharded": (3, (*DDP, SHARDED)),
    "fsdp-2": (2, FSDP),
    "fsdp-2-sharded-fp16": (2, (*FSDP, *FP16, SHARDED)),
    "fsdp-2-sharded-async": (2, (*FSDP, SHARDED, "checkpoint.async=true")),
}
FAST = ("single", "ddp-3", "fsdp-2-sharded-fp16")


def stopped_and_resumed(root: Path, stops: list[int], overrides: tuple[str, ...]) -> dict[int, list[str]]:
    """Compare runs resumed after each of ``stops`` with one never stopped; returns what differs after
    which."""
    torch.set_num_threads(1)
    found: dict[int, list[str]] = {}
    with process_group(runs.settings(*overrides).distributed) as dist:
        original = run(dist, root / "original", *overrides)
        micro_batches = len(original["samples"]) // LAST_STEP
        for stop in stops:
            checkpoint = root / "original" / "checkpoints" / f"step_{stop:08d}"
            once = (*overrides, "checkpoint.every_steps=null")
            resumed = run(dist, root / f"stopped_{stop}", *once, resume=str(checkpoint))
            expected = original["samples"][micro_batches * stop :]
            found[stop] = differences(original["end"], resumed["end"])
            found[stop] += differences(original["generators"], resumed["generators"])
            found[stop] += [] if resumed["samples"][-len(expected) :] == expected else ["samples"]
    return {stop: different for stop, different in found.items() if different}


def _compare(root: Path, name: str, stops: list[int]) -> None:
    world, overrides = CONFIGURATIONS[name]
    settings = (*overrides, ACCUMULATING)
    found = run_ranks(stopped_and_resumed, world, root, stops, settings, init=False, timeout_s=280)
    assert found == [{}] * world


@pytest.mark.parametrize("name", FAST)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name, [3, 5])  # within an epoch, and between two


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_is_the_same_run_wherever_it_stopped(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name, list(range(1, 13)))


def _without_warm_up(root: Path, overrides: tuple[str, ...]) -> dict[int, list[str]]:
    loop.warm_up = lambda job, batches: batches
    return stopped_and_resumed(root, [3], overrides)


def test_three_ddp_ranks_would_differ_without_the_warm_up(tmp_path: Path) -> None:
    """DDP's first backward pass fills other buckets than the later ones."""
    found = run_ranks(_without_warm_up, 3, tmp_path, DDP, init=False)
    assert "model.first.weight" in found[0][3]
