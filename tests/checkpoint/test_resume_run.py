"""Whole runs, stopped at every step: what follows is, bit by bit, what would have followed without it."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import runs
from tests.ranks import run_ranks
from trainer import loop, seeding
from trainer.checkpoint import full
from trainer.checkpoint.tree import take_apart
from trainer.distributed import Dist, process_group
from trainer.run import assemble
from trainer.signals import StopRequest

LAST_STEP = 14
BASE = (
    "data.dataset._target_=tests.checkpoint.noisy.Noisy",
    "model._target_=tests.checkpoint.noisy.DropoutNet",
    "~model.input_shape",
    "~model.hidden",
    "optim=adamw",
    "optim.lr=0.01",
    "schedule=cosine",
    "train.epochs=3",
    f"train.max_steps={LAST_STEP}",
    "train.global_batch_size=12",  # 5 steps to an epoch
    "train.micro_batch_size=2",
    "train.clip_grad_norm=1.0",
    "train.log_every_steps=3",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=20",
    "strategy.first_bucket_mb=0.001",
    "strategy.bucket_cap_mb=0.001",
    "distributed.timeout_s=60",
)
NOT_DDP = tuple(override for override in BASE if "bucket" not in override)


class Recorder:
    """A task that notes a hash of each batch it is given."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.batches: list[str] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in batch)).hexdigest())
        return self._task.loss(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def run(dist: Dist, run_dir: Path, *overrides: str, resume: str = "null") -> dict[str, Any]:
    """Train to the end; returns all that a run is then, and the batches it saw from where it began."""
    config = runs.settings(*overrides, f"run_dir={run_dir}", f"resume={resume}")
    with StopRequest() as stop_request:
        job = assemble(config, dist, stop_request)
        recorder = Recorder(job.task)
        loop.fit(dataclasses.replace(job, task=recorder))
    job.checkpointer.close()
    job.strategy.close()
    job.run_log.close()
    tensors, plain = take_apart(job.state.state_dict())
    rng_tensors, rng_plain = take_apart(seeding.rng_state())
    whole = {name: tensor.clone() for name, tensor in full.gather(tensors, rank=0).items()}
    return {"tensors": whole | rng_tensors, "plain": plain | rng_plain, "batches": recorder.batches}


def stopped_and_resumed(root: Path, stops: list[int], overrides: list[str]) -> list[str]:
    """Compare runs resumed after each of ``stops`` with one never stopped; returns what differs."""
    torch.set_num_threads(1)
    differences = []
    with process_group(runs.settings(*overrides).distributed) as dist:
        original = run(dist, root / "original", *overrides)
        micro_batches = len(original["batches"]) // LAST_STEP
        for stop in stops:
            resume = root / "original" / "checkpoints" / f"step_{stop:08d}"
            resumed = run(
                dist, root / f"stopped_{stop}", *overrides, "checkpoint.every_steps=null", resume=str(resume)
            )
            expected = original["batches"][micro_batches * stop :]
            if resumed["batches"][-len(expected) :] != expected:
                differences.append(f"stop {stop}: other batches")
            if resumed["plain"] != original["plain"]:
                differences.append(f"stop {stop}: other plain state")
            different = [
                k for k, v in original["tensors"].items() if not torch.equal(v, resumed["tensors"][k])
            ]
            if different:
                differences.append(f"stop {stop}: {len(different)} other tensors, {different[:3]}")
    return differences


CONFIGURATIONS = {
    "single": (1, ["strategy=single", *NOT_DDP]),
    "single-workers-fp16": (1, ["strategy=single", *NOT_DDP, "data.num_workers=2", "train.precision=fp16"]),
    "ddp-2": (2, ["strategy=ddp", *BASE]),
    "ddp-3": (3, ["strategy=ddp", *BASE]),
    "ddp-3-sharded": (3, ["strategy=ddp", *BASE, "checkpoint=sharded"]),
    "ddp-2-workers-fp16-async": (
        2,
        ["strategy=ddp", *BASE, "data.num_workers=2", "train.precision=fp16", "checkpoint.async=true"],
    ),
    "fsdp-2": (2, ["strategy=fsdp", *NOT_DDP]),
    "fsdp-2-sharded-fp16": (
        2,
        ["strategy=fsdp", *NOT_DDP, "checkpoint=sharded", "train.precision=fp16", "+model.norm=false"],
    ),
}


FAST = ("single", "ddp-3", "fsdp-2-sharded-fp16")


def _compare(root: Path, name: str, stops: list[int]) -> None:
    world, overrides = CONFIGURATIONS[name]
    for rank, differences in enumerate(
        run_ranks(stopped_and_resumed, world, root, stops, overrides, init=False, timeout_s=110)
    ):
        assert differences == [], f"rank {rank}"


@pytest.mark.parametrize("name", FAST)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name, [3, 5])  # within an epoch, and between two


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_is_the_same_run_wherever_it_stopped(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name, list(range(1, 13)))


def _without_warm_up(root: Path, overrides: list[str]) -> list[str]:
    loop.warm_up = lambda job, batches: batches
    return stopped_and_resumed(root, [3], overrides)


def test_three_ddp_ranks_would_differ_without_the_warm_up(tmp_path: Path) -> None:
    """DDP's first backward pass fills other buckets than the later ones."""
    differences = run_ranks(_without_warm_up, 3, tmp_path, CONFIGURATIONS["ddp-3"][1], init=False)
    assert all("other tensors" in differences[rank][0] for rank in range(3))
