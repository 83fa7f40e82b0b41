"""Interrupted runs: after the resume, all bits equal those of an uninterrupted run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import runs
from tests.checkpoint.whole_runs import DDP, FP16, FSDP, LAST_STEP, PS, SINGLE, differences, run
from tests.ranks import run_ranks
from trainer import loop
from trainer.distributed.process_group import process_group
from trainer.errors import StoppedBySignal

SHARDED, WORKERS = "checkpoint=sharded", "data.num_workers=2"
# Each strategy, and of formats, precisions, workers and saves in the background each with each other.
CONFIGURATIONS = {
    "single-workers-fp16": (1, (*SINGLE, *FP16, WORKERS)),
    "ddp-2-workers-fp16-async": (2, (*DDP, *FP16, WORKERS, "checkpoint.async=true")),
    "ddp-3-sharded": (3, (*DDP, "+model.hook=true", SHARDED)),
    "ddp-2-ring-bf16": (2, (*DDP, "comm=ring", "comm.wire_dtype=bf16")),
    "ddp-2x2-hierarchical": (4, (*DDP, "comm=hierarchical", "+model.norm=false")),
    "ps-1+2-sharded-async": (3, (*PS, SHARDED, "checkpoint.async=true")),
    "ps-all-3-workers": (3, (*PS, "strategy.servers=all", WORKERS)),
    "fsdp-2-fp16-async": (2, (*FSDP, *FP16, "checkpoint.async=true")),
}
STOPS = (1, 3, 5)  # after the first step, between two epochs, within the second
HOSTS = {"ddp-2x2-hierarchical": (0, 0, 1, 1)}


def stopped_and_resumed(root: Path, stop: int, overrides: tuple[str, ...]) -> list[str]:
    """Return what differs between a run resumed after the step ``stop`` and an uninterrupted one."""
    torch.set_num_threads(1)
    with process_group(runs.settings(*overrides).distributed) as ranks:
        # The step after it, too: a background save overlaps with the next.
        original = run(ranks, root / "original", *overrides, save_at=(stop, stop + 1))
        checkpoint = root / "original" / "checkpoints" / f"step_{stop:08d}"
        resumed = run(ranks, root / "stopped", *overrides, resume=str(checkpoint), save_at=())
    expected = original["samples"][len(original["samples"]) // LAST_STEP * stop :]
    found = differences(original["end"], resumed["end"])
    return found + ([] if resumed["samples"] == expected else ["samples"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_equals_an_uninterrupted_one_wherever_it_stopped(tmp_path: Path, name: str) -> None:
    world, overrides = CONFIGURATIONS[name]
    stop = STOPS[list(CONFIGURATIONS).index(name) % 3]
    options = (f"train.micro_batch_size={2 if world < 4 else 1}", *overrides)
    hosts = HOSTS.get(name)
    found = run_ranks(stopped_and_resumed, world, tmp_path, stop, options, hosts=hosts, init=False)
    assert found == [[]] * world


def _without_dry_run(root: Path, overrides: tuple[str, ...]) -> list[str]:
    loop.dry_run = lambda run, micro_batches: frozenset()
    return stopped_and_resumed(root, 2, overrides)


@pytest.mark.slow
def test_three_ddp_ranks_would_differ_without_a_dry_run(tmp_path: Path) -> None:
    """DDP's first backward pass uses other buckets than later ones."""
    found = run_ranks(_without_dry_run, 3, tmp_path, DDP, init=False)
    assert "model.first.weight" in found[0]


def _stop_and_finish(
    root: Path, stop_after: int
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, Any]]:
    """Stop a run by a signal and resume it; return TensorBoard's steps and result.json."""
    torch.set_num_threads(1)
    settings = (*SINGLE, "logger=tensorboard", f"run_dir={root}", "train.log_every_steps=1")
    train_step = loop.train_step

    def told_to_stop(context: Any, *args: Any, **kwargs: Any) -> Any:
        if context.state.progress.step == stop_after - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(context, *args, **kwargs)

    loop.train_step = told_to_stop
    if stop_after:
        with pytest.raises(StoppedBySignal):
            runs.train(*settings)
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()
    loop.train_step = train_step
    result = runs.train(*settings, "resume=auto")
    events = EventAccumulator(str(root), size_guidance={"scalars": 0})
    events.Reload()
    names = ("train/loss", "train/lr", "eval/loss")
    rows = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    return rows, result


@pytest.mark.slow
def test_tensorboard_continues_without_duplicate_or_missing_steps(tmp_path: Path) -> None:
    """Also if the signal came at the end of an epoch, or at the end of the run before its evaluation."""
    ((whole, result),) = run_ranks(_stop_and_finish, 1, tmp_path / "0", 0, init=False)
    assert [step for step, _ in whole["train/loss"]] == list(range(1, LAST_STEP + 1))
    assert [step for step, _ in whole["eval/loss"]] == [3, 6, 8]
    for stop in (3, LAST_STEP):
        ((resumed, its_result),) = run_ranks(_stop_and_finish, 1, tmp_path / str(stop), stop, init=False)
        assert resumed == whole
        assert its_result["param_sha256"] == result["param_sha256"]
        assert its_result["eval/accuracy"] == result["eval/accuracy"]
        assert its_result["samples_seen"] == result["samples_seen"]
