"""Injected faults (`fault=kill fault.rank=1 fault.step=10`), to test a cluster's reaction.

The heartbeat receives each phase anyway, so the loop has no line for this.
"""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import (
    CutFaultConfig,
    DivergeFaultConfig,
    FaultConfig,
    RankFaultConfig,
    SlowFaultConfig,
    TimedFaultConfig,
)
from trainer.errors import UserError
from trainer.faults.heartbeat import Heartbeat
from trainer.local_shard import to_local
from trainer.nested import mapped
from trainer.optim.train_state import TrainState

log = logging.getLogger(__name__)

Replicated = Callable[[], Iterable[tuple[str, Tensor]]]
MARKER = "fault.json"  # in the run directory: which fault was injected, and when


class InjectedError(RuntimeError):
    """Raised by `fault=raise`."""


class FaultInjector:
    """Injects the fault when its phase comes, after recording it.

    Once in a run, also across restarts: a file in the run directory records it.
    """

    def __init__(self, fault: FaultConfig, rank: int, hosts: Sequence[int], run_dir: Path) -> None:
        """
        Args:
            rank: this rank; `hosts` has the host of each.

        Raises:
            UserError: the run has no such rank or host; raised on every rank.
        """
        self._rank, self._marker = rank, run_dir / MARKER
        self._replicated: Replicated | None = None
        self._fault = fault if isinstance(fault, TimedFaultConfig) else None
        if self._fault is not None and _read(self._marker).get("fault") == dataclasses.asdict(fault):
            log.info("fault=%s was injected in this run before, and is not repeated", fault.kind)
            self._fault = None
        self._is_here = self._fault is not None and rank in _ranks_of(self._fault, hosts)
        self._poisons = False

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """The heartbeat to use from now on: `heartbeat` itself, except on the rank of the fault."""
        return _ReportedHeartbeat(heartbeat, self._at) if self._is_here else heartbeat

    def attach(
        self, model: nn.Module, state: TrainState, total_steps: int, replicated: Replicated | None
    ) -> None:
        """Receive the objects that some faults change, before the first step.

        Args:
            model: this rank's module.
            replicated: yields the tensors that ranks share, by name; None if no ranks share any.

        Raises:
            UserError: this run will never be at the step of the fault; raised on every rank.
        """
        fault, done = self._fault, state.progress.step
        if fault is None:
            return
        if not done < fault.step <= total_steps:
            begin = f"resumes after step {done} and " if done else ""
            raise UserError(f"fault.step is {fault.step}, but the run {begin}has {total_steps} steps")
        if fault.kind == "diverge" and replicated is None:
            raise UserError(
                "fault=diverge needs ranks that hold the same values: strategy=ddp on several, or "
                "strategy=fsdp with strategy.shard_group=host on several hosts"
            )
        self._replicated = replicated
        if fault.kind == "nan" and self._is_here:
            model.register_forward_hook(self._poison)
        if fault.phase == "update" and self._is_here:  # in the middle: the schedule and the step are to come
            state.optimizer.register_step_post_hook(lambda *_: self._at("update", state.progress.step + 1))

    def _at(self, phase: str, step: int) -> None:
        fault = self._fault
        if fault is not None and phase == fault.phase and step >= fault.step:
            self._fault = None
            self._make(fault, step)

    def _make(self, fault: TimedFaultConfig, step: int) -> None:
        words = f"fault={fault.kind}, as asked for: rank {self._rank}, step {step}, {fault.phase}"
        facts = {"fault": dataclasses.asdict(fault), "step": step, "pid": os.getpid(), "time": time.time()}
        self._marker.write_text(json.dumps(facts, indent=2) + "\n")
        log.warning("%s", words)
        match fault:
            case SlowFaultConfig():
                time.sleep(fault.seconds)
            case DivergeFaultConfig():
                self._diverge(fault)
            case CutFaultConfig():
                subprocess.run(fault.command, shell=True, check=True, timeout=60)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedError(words)
            case "hang":
                while True:
                    time.sleep(1)
            case "exit":
                os._exit(1)
            case "nan":
                self._poisons = True

    def _poison(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        poisons, self._poisons = self._poisons, False
        return mapped(output, _times_nan) if poisons else output

    def _diverge(self, fault: DivergeFaultConfig) -> None:
        assert self._replicated is not None
        tensors = {name: to_local(tensor) for name, tensor in self._replicated()}
        name = fault.tensor or next(name for name, tensor in tensors.items() if tensor.numel())
        if name not in tensors or not tensors[name].numel():
            raise UserError(f"fault.tensor is {name}, but rank {self._rank} has {', '.join(tensors)}")
        flip(tensors[name], 0, fault.bit)


class _ReportedHeartbeat(Heartbeat):
    """A heartbeat that also reports its calls; it writes the record of the original one."""

    def __init__(self, heartbeat: Heartbeat, tell: Callable[[str, int], None]) -> None:
        self.__dict__.update(heartbeat.__dict__)
        self._owner, self._tell = heartbeat, tell

    def __del__(self) -> None:
        """The original closes the memory."""

    def enter(self, phase: str, bucket: int = -1) -> None:
        super().enter(phase, bucket)
        self._tell(phase, self.step)


def _ranks_of(fault: TimedFaultConfig, hosts: Sequence[int]) -> Sequence[int]:
    """The ranks of the fault; a host is cut off by its first rank."""
    if isinstance(fault, CutFaultConfig):
        if fault.host not in hosts:
            raise UserError(f"fault.host is {fault.host}, but the hosts of this run are 0 to {max(hosts)}")
        return [list(hosts).index(fault.host)]
    assert isinstance(fault, RankFaultConfig)
    if fault.rank >= len(hosts):
        raise UserError(f"fault.rank is {fault.rank}, but the ranks of this run are 0 to {len(hosts) - 1}")
    if fault.rank + fault.count > len(hosts):
        raise UserError(
            f"fault.count is {fault.count}, but there are {len(hosts) - fault.rank} ranks from "
            f"fault.rank={fault.rank} on"
        )
    if fault.phase == "all_reduce" and len(hosts) == 1:
        raise UserError(
            "fault.phase=all_reduce never happens in a run of one process; use fault.phase=backward"
        )
    return range(fault.rank, fault.rank + fault.count)


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element, in place; the bit is taken modulo the size of the dtype."""
    size = tensor.element_size()
    lanes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bit %= 8 * size
    element = tensor.detach().view(-1).view(lanes)[index]
    element.bitwise_xor_(1 << bit if bit < 8 * size - 1 else -(1 << bit))


def _times_nan(value: Any) -> Any:
    return value * torch.nan if isinstance(value, Tensor) and value.is_floating_point() else value


def _read(marker: Path) -> dict[str, Any]:
    try:
        facts = json.loads(marker.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
