"""Faults made on purpose (`fault=kill fault.rank=1 fault.step=10`), to see on one's own cluster what follows.

The heartbeat is told of each phase anyway, so the loop has no line for this.
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
from trainer.optim.train_state import Progress

log = logging.getLogger(__name__)

Replicated = Callable[[], Iterable[tuple[str, Tensor]]]
MARKER = "fault.json"  # in the run directory: what was done, and when


class InjectedError(RuntimeError):
    """What `fault=raise` raises."""


class FaultInjector:
    """Makes the fault when its phase comes, after that was noted.

    Once in a run, also across restarts: a file in the run directory tells of it, and the same fault is not
    made again.
    """

    def __init__(self, fault: FaultConfig, rank: int, hosts: Sequence[int], run_dir: Path) -> None:
        """
        Args:
            rank: this one; the host of each stands in `hosts`.

        Raises:
            UserError: on every rank alike, where the run has no such rank or host.
        """
        self._rank, self._marker = rank, run_dir / MARKER
        self._replicated: Replicated | None = None
        self._fault = fault if isinstance(fault, TimedFaultConfig) else None
        if self._fault is not None and _read(self._marker).get("fault") == dataclasses.asdict(fault):
            log.info("fault=%s was made in this run before, and is not again", fault.kind)
            self._fault = None
        self._is_here = self._fault is not None and _rank_of(self._fault, hosts) == rank
        self._poisons = False

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """The one to be told of phases from now on: `heartbeat` itself, but on the rank of the fault."""
        return _Overheard(heartbeat, self._at) if self._is_here else heartbeat

    def meet(
        self, model: nn.Module, progress: Progress, total_steps: int, replicated: Replicated | None
    ) -> None:
        """Be told what some faults change, before the first step.

        Args:
            model: what this rank computes with.
            replicated: yields what ranks hold the same of, by name; None where there are no such ranks.

        Raises:
            UserError: on every rank alike, where this run will never be at the step of the fault.
        """
        fault, done = self._fault, progress.step
        if fault is None:
            return
        if not done < fault.step <= total_steps:
            begin = f"goes on after step {done} and " if done else ""
            raise UserError(f"fault.step is {fault.step}, but the run {begin}has {total_steps} steps")
        if fault.kind == "diverge" and replicated is None:
            raise UserError(
                "fault=diverge needs ranks that hold the same: strategy=ddp on several, or strategy=fsdp "
                "with strategy.shard_group=host on several hosts"
            )
        self._replicated = replicated
        if fault.kind == "nan" and self._is_here:
            model.register_forward_hook(self._poison)

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
        return _times_nan(output) if poisons else output

    def _diverge(self, fault: DivergeFaultConfig) -> None:
        assert self._replicated is not None
        tensors = {name: to_local(tensor) for name, tensor in self._replicated()}
        name = fault.tensor or next(name for name, tensor in tensors.items() if tensor.numel())
        if name not in tensors or not tensors[name].numel():
            raise UserError(f"fault.tensor is {name}, but rank {self._rank} has {', '.join(tensors)}")
        flip(tensors[name], 0, fault.bit)


class _Overheard(Heartbeat):
    """A heartbeat that passes on what it is told; its record is the one it was made from."""

    def __init__(self, heartbeat: Heartbeat, tell: Callable[[str, int], None]) -> None:
        self.__dict__.update(heartbeat.__dict__)
        self._owner, self._tell = heartbeat, tell

    def __del__(self) -> None:
        """The memory is the owner's to close."""

    def enter(self, phase: str, bucket: int = -1) -> None:
        super().enter(phase, bucket)
        self._tell(phase, self.step)


def _rank_of(fault: TimedFaultConfig, hosts: Sequence[int]) -> int:
    """Where the fault is made; a host is cut off by its first rank."""
    if isinstance(fault, CutFaultConfig):
        if fault.host not in hosts:
            raise UserError(f"fault.host is {fault.host}, but the hosts of this run are 0 to {max(hosts)}")
        return list(hosts).index(fault.host)
    assert isinstance(fault, RankFaultConfig)
    if fault.rank >= len(hosts):
        raise UserError(f"fault.rank is {fault.rank}, but the ranks of this run are 0 to {len(hosts) - 1}")
    if fault.phase == "all_reduce" and len(hosts) == 1:
        raise UserError(
            "fault.phase=all_reduce never comes in a run of one process; take fault.phase=backward"
        )
    return fault.rank


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Turn one bit of one element over, in place; bits beyond the dtype's begin anew."""
    size = tensor.element_size()
    lanes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bit %= 8 * size
    element = tensor.detach().view(-1).view(lanes)[index]
    element.bitwise_xor_(1 << bit if bit < 8 * size - 1 else -(1 << bit))


def _times_nan(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output * torch.nan if output.is_floating_point() else output
    if isinstance(output, dict):
        return type(output)({key: _times_nan(value) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(_times_nan(value) for value in output)
    return output


def _read(marker: Path) -> dict[str, Any]:
    try:
        facts = json.loads(marker.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
