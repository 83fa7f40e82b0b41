"""A run that goes on with other ranks, strategy or format: the same tensors, the next samples."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.checkpoint.whole_runs import DDP, FSDP, LAST_STEP, PS, SINGLE, differences, run
from tests.ranks import run_ranks
from trainer.checkpoint.source import Source
from trainer.distributed import process_group

SHARDED = "checkpoint=sharded"
STOP = 7  # the second epoch is half done
HYBRID = (*FSDP, "strategy.shard_group=2")
PS_2, PS_ALL = (*PS, "strategy.servers=2"), (*PS, "strategy.servers=all")
CHANGES = {
    "fsdp 2 -> 4": (2, (*FSDP, SHARDED), 4, FSDP),
    "fsdp 4 -> 2": (4, (*FSDP, SHARDED), 2, FSDP),
    "fsdp 2 -> 1": (2, (*FSDP, SHARDED), 1, FSDP),
    "fsdp 2 -> 1, full": (2, FSDP, 1, FSDP),
    "ddp 2 -> fsdp 2": (2, DDP, 2, FSDP),
    "ddp 2, sharded -> fsdp 3": (2, (*DDP, SHARDED), 3, FSDP),
    "fsdp 2 -> ddp 2": (2, (*FSDP, SHARDED), 2, DDP),
    "fsdp 2, full -> ddp 3": (2, FSDP, 3, DDP),
    "fsdp 4, hybrid -> fsdp 3": (4, (*HYBRID, SHARDED), 3, FSDP),
    "ddp 3 -> fsdp 4, hybrid": (3, DDP, 4, HYBRID),
    "ps 1+2 -> ddp 2": (3, PS, 2, DDP),
    "ddp 2, sharded -> ps 1+2": (2, (*DDP, SHARDED), 3, PS),
    "ps 1+2, sharded -> ps 2+2": (3, (*PS, SHARDED), 4, PS_2),
    "ps 2+2 -> ps all 3": (4, PS_2, 3, PS_ALL),
    "ps all 3, sharded -> fsdp 2": (3, (*PS_ALL, SHARDED), 2, FSDP),
    "fsdp 2, sharded -> ps 1+2": (2, (*FSDP, SHARDED), 3, PS),
    "fsdp 4 -> single": (4, (*FSDP, SHARDED), 1, SINGLE),
}
ONCE = f"checkpoint.every_steps={STOP}"  # and at the end


def _run(run_dir: Path, overrides: tuple[str, ...], resume: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with process_group(runs.settings(*overrides).distributed) as dist:
        return run(dist, run_dir, *overrides, resume=resume)


def _samples_by_step(results: list[dict[str, Any]], num_steps: int) -> list[list[str]]:
    """All samples that all ranks trained on in each of the last ``num_steps`` steps, in sorted order."""
    steps: list[list[str]] = [[] for _ in range(num_steps)]
    results = [result for result in results if result["samples"]]  # a parameter server reads none
    per_rank = 12 // len(results)
    for result in results:
        samples = [sample for batch in result["samples"] for sample in batch][-per_rank * num_steps :]
        for number, sample in enumerate(samples):
            steps[number // per_rank].append(sample)
    return [sorted(step) for step in steps]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """What each rank saw of a run never stopped, and its checkpoint half way; several changes begin with one."""

    @functools.cache
    def run_whole(world: int, overrides: tuple[str, ...]) -> tuple[list[dict[str, Any]], Path]:
        root = tmp_path_factory.mktemp("whole")
        results = run_ranks(_run, world, root, (*overrides, ONCE), "null", init=False)
        return results, root / "checkpoints" / f"step_{STOP:08d}"

    return run_whole


@pytest.mark.slow
@pytest.mark.xdist_group("changes of the world")  # `whole` is of this process
@pytest.mark.parametrize("name", CHANGES)
def test_the_same_tensors_and_the_next_samples(
    tmp_path: Path, name: str, whole: Callable[..., tuple[list[dict[str, Any]], Path]]
) -> None:
    world, overrides, new_world, new_overrides = CHANGES[name]
    before, checkpoint = whole(world, overrides)
    new_overrides = (*new_overrides, "checkpoint.every_steps=null", "checkpoint.every_epochs=null")
    after = run_ranks(_run, new_world, tmp_path, new_overrides, str(checkpoint), init=False)
    saved = Source.open(checkpoint)
    assert differences({"tensors": saved.read(), "plain": saved.facts["state"]}, after[0]["begin"]) == []
    assert differences(after[0]["begin"], after[0]["end"]) != []
    expected = _samples_by_step(before, LAST_STEP)
    assert [len(set(step)) for step in expected] == [12] * LAST_STEP
    assert _samples_by_step(after, LAST_STEP - STOP) == expected[STOP:]
