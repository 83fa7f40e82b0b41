"""Inject a failure into a run, on chosen ranks, in a chosen step and phase.

    run(..., *inject("kill", rank=0, step=8, phase="optimizer"))

`inject` returns overrides of `data.task`. The task is built on every rank before the data and the model;
building it replaces `Heartbeat.enter`, which is called in every phase of a run. The task is the same as
without a failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_class
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainer.failures.heartbeat import Heartbeat
from trainer.tensors.local_shard import to_local

KINDS = ("kill", "term", "stop", "raise", "hang", "exit", "slow", "nan", "nan_gradient", "diverge", "cut")
CLASSIFICATION = "trainer.tasks.Classification"


class InjectedError(RuntimeError):
    """Raised by a failure of the kind `raise`."""


def inject(
    kind: str,
    rank: int = 1,
    step: int = 10,
    phase: str = "forward",
    *,
    count: int = 1,
    mark: Path | None = None,
    seconds: float = 3.0,
    command: str = "",
    task: str = CLASSIFICATION,
) -> tuple[str, ...]:
    """Return overrides that inject a failure when `phase` is first entered in or after `step`.

    Args:
        kind: one of KINDS. nan, nan_gradient: the model's next output, or its gradient, is NaN; diverge: a bit
            of a parameter flips; cut: `command` disconnects the rank's host.
        rank: the first of the `count` ranks that fail.
        phase: one of heartbeat.PHASES, all_reduce, or update (after the update, before the step is counted).
        mark: a file that records the failure, so that it isn't repeated after a restart.
        seconds: duration of `slow`.
        task: the class of the run's task.
    """
    assert kind in KINDS
    facts: dict[str, Any] = {"kind": f"'{kind}'", "ranks": list(range(rank, rank + count)), "step": step}
    facts |= {"phase": phase, "seconds": seconds}
    facts |= {"mark": f"'{mark}'"} if mark is not None else {}
    facts |= {"command": f"'{command}'"} if command else {}
    fields = ",".join(f"{name}:{value}" for name, value in facts.items())
    return (
        "data.task._target_=tests.failure_parts.failing_task",
        f"+data.task.failure={{{fields}}}",
        f"+data.task.of={task}",
    )


def failing_task(failure: Mapping[str, Any], of: str, **settings: Any) -> Any:
    """Build the task `of` with `settings`; arrange the failure if it is this rank's."""
    mark = Path(failure["mark"]) if "mark" in failure else None
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank in failure["ranks"] and not (mark and mark.exists()):
        _Failure(failure, mark).arrange()
    return get_class(of)(**settings)


class _Failure:
    """A failure that will happen in this process."""

    def __init__(self, facts: Mapping[str, Any], mark: Path | None) -> None:
        self._facts, self._mark, self._is_pending = facts, mark, True
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._heartbeat: Heartbeat | None = None

    def arrange(self) -> None:
        enter = Heartbeat.enter

        def enter_phase(heartbeat: Heartbeat, phase: str, bucket: int = -1) -> None:
            self._heartbeat = heartbeat
            enter(heartbeat, phase, bucket)
            self._fail_if_due(phase, heartbeat.step)

        Heartbeat.enter = enter_phase  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    def _after_update(self, *_: Any) -> None:
        if self._heartbeat is not None:  # None: a trial step of the optimizer during set-up
            self._fail_if_due("update", self._heartbeat.step)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _fail_if_due(self, phase: str, step: int) -> None:
        if self._is_pending and phase == self._facts["phase"] and step >= self._facts["step"]:
            self._is_pending = False
            self._fail(f"{self._facts['kind']}, injected: step {step}, {phase}", step)

    def _fail(self, words: str, step: int) -> None:
        if self._mark is not None:
            made = {"step": step, "pid": os.getpid(), "time": time.time()}
            unique = self._mark.with_suffix(f".{os.getpid()}")  # several ranks may fail at once
            unique.write_text(json.dumps(made))
            unique.replace(self._mark)
        match self._facts["kind"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedError(words)
            case "hang":
                while True:
                    time.sleep(1)
            case "exit":
                os._exit(1)
            case "slow":
                time.sleep(self._facts["seconds"])
            case "nan":
                self._poison_next_output(lambda output: output * torch.nan)
            case "nan_gradient":
                self._poison_next_output(lambda output: output + (output - output.detach()).sqrt())
            case "diverge":
                optimizer = self._optimizer and self._optimizer()
                assert optimizer is not None, "no update has been made"
                parameters = (to_local(each) for group in optimizer.param_groups for each in group["params"])
                flip(next(each for each in parameters if each.numel()), 0, 20)
            case "cut":
                subprocess.run(self._facts["command"], shell=True, check=True, timeout=60)

    def _poison_next_output(self, poisoned: Callable[[Tensor], Tensor]) -> None:
        def poison(module: nn.Module, inputs: Any, output: Any) -> Any:
            handle.remove()
            return poisoned(output) if isinstance(output, Tensor) else output

        handle = register_module_forward_hook(poison)


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element in place; `bit` is taken modulo the size of the dtype in bits."""
    size = tensor.element_size()
    lanes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bit %= 8 * size
    element = tensor.detach().view(-1).view(lanes)[index]
    element.bitwise_xor_(1 << bit if bit < 8 * size - 1 else -(1 << bit))
