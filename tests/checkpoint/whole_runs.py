"""Runs of the real training loop, with values and samples that can be compared."""

import dataclasses
import hashlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests import runs
from tests.checkpoint import tiny
from trainer import loop
from trainer.assemble import assemble
from trainer.checkpoint.tree import take_apart
from trainer.distributed.ranks import Ranks
from trainer.launch.signals import StopRequest

LAST_STEP = 8
SETTINGS = (
    "logger=jsonl",
    "data.dataset._target_=tests.checkpoint.noisy.Noisy",
    "model._target_=tests.checkpoint.noisy.DropoutNet",
    "~model.input_shape",
    "~model.hidden",
    "optim=adamw",
    "optim.lr=0.01",
    "schedule=cosine",
    "train.epochs=3",
    f"train.max_steps={LAST_STEP}",
    "train.global_batch_size=12",  # 3 steps to an epoch
    "train.clip_grad_norm=1.0",
    "train.log_every_steps=2",
    "checkpoint.keep_last=20",
    "distributed.timeout_s=60",
)
DDP = ("strategy=ddp", "strategy.bucket_cap_mb=0.001", *SETTINGS)
FSDP = ("strategy=fsdp", *SETTINGS)
PS = ("strategy=parameter_server", "strategy.bucket_mb=0.001", *SETTINGS)
SINGLE = ("strategy=single", *SETTINGS)
FP16 = ("train.precision=fp16", "+model.norm=false")


def hashes_of(inputs: Tensor) -> list[str]:
    return [hashlib.sha256(sample.numpy().tobytes()).hexdigest() for sample in inputs]


class Recorder:
    """A task that records the value of `named` for the inputs of each micro-batch."""

    def __init__(self, task: Any, named: Callable[[Tensor], list[Any]]) -> None:
        self._task, self._named = task, named
        self.samples: list[list[Any]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.samples.append(self._named(batch[0]))
        return self._task.loss(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def run(
    ranks: Ranks,
    run_dir: Path,
    *overrides: str,
    resume: str = "null",
    save_at: Container[int] | None = None,
    named: Callable[[Tensor], list[Any]] = hashes_of,
) -> dict[str, Any]:
    """Train to the end, saving there and at the steps of ``save_at``, or when the settings say.

    Returns the state at the start and at the end (with full tensors), the result, and the value of ``named``
    for each micro-batch of this rank.
    """
    config = runs.settings(*overrides, f"run_dir={run_dir}", f"resume={resume}")
    run_dir.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop_request:
        context = assemble(config, "tests", ranks, stop_request)
        context.report.run_log.open()
        begin = _everything(context)
        recorder = Recorder(context.task, named)
        if save_at is not None:  # at each step, saving would be half of such a run
            context.checkpointer.due = lambda progress, end_of_epoch: progress.step in save_at  # type: ignore[method-assign]
        result = loop.fit(dataclasses.replace(context, task=recorder))
    context.checkpointer.saving.wait()
    end = _everything(context)
    context.strategy.close()
    context.report.run_log.close()
    return {
        "begin": begin,
        "end": end,
        "result": result,
        "samples": recorder.samples[1:],
    }  # the first are the dry run's


def _everything(context: Any) -> dict[str, Any]:
    with context.strategy.gathered(context.state):
        tensors, plain = take_apart(context.state.state_dict())
        return {"tensors": tiny.whole(tensors), "plain": plain}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of all values that differ in any bit."""
    if a["tensors"].keys() != b["tensors"].keys():
        return ["other tensors"]
    names = [name for name, tensor in a["tensors"].items() if not tensor.equal(b["tensors"][name])]
    return names + [key for key in a["plain"] if a["plain"][key] != b["plain"].get(key)]
