"""What this process saves by itself at a fault: its state after the last finished step."""

import copy
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import Checkpointer
from trainer.checks.replicas import ReplicaCheck
from trainer.config import Config
from trainer.data.loading.base import TrainLoader
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.faults.gate import UPDATE_S, Gate, NoGate
from trainer.nested import mapped
from trainer.optim.plain_names import named_modules
from trainer.optim.train_state import TrainState
from trainer.strategies.base import Strategy
from trainer.training.kept_buffers import KeptBuffers


class KeptStep(Gate):
    """The gate of a run that saves at a fault, and what the watch saves.

    Args:
        why_not: why one rank cannot save this run, in a phrase; None if it can.
        own_buffers: whether ranks have different buffers, of which those of rank 0 are the model's.
    """

    def __init__(
        self,
        dist: Dist,
        state: TrainState,
        checkpointer: Checkpointer,
        loader: TrainLoader,
        replica_check: ReplicaCheck,
        *,
        why_not: str | None,
        own_buffers: bool,
    ) -> None:
        super().__init__(dist.heartbeat)
        self._dist, self._state, self._checkpointer, self._loader = dist, state, checkpointer, loader
        self._replica_check, self._own_buffers = replica_check, own_buffers and dist.rank != 0
        self._buffers = KeptBuffers(state.model)
        self._shared_after = -1  # the step after which the kept buffers were those of rank 0
        self._keepers = _keepers_of_extra_state(state.model)
        self._extra_states = self._copied_extra_states()
        self._data_state: dict[str, Any] = {}
        self._updated = torch.cuda.Event() if dist.device.type == "cuda" else None
        self._frozen = False
        self.why_not = why_not

    def note_shared_buffers(self) -> None:
        if self._own_buffers and self._state.average is None:  # averages of buffers are not shared
            with self.held():
                self._buffers.keep()
                self._shared_after = self._state.progress.step

    def keep(self) -> None:
        if not self._own_buffers:
            self._buffers.keep()
        self._extra_states = self._copied_extra_states()
        self._data_state = self._loader.state_dict()
        if self._updated is not None:
            self._updated.record()

    def freeze(self, failed: bool) -> int:
        self._frozen = self._frozen or self.take(timeout_s=0.5 if failed else UPDATE_S)
        if not self._frozen:
            step = self._state.progress.step
            doing = f"was within an update, or evaluated averages, after step {step}"
            raise UserError(f"rank {self._dist.rank} {doing}")
        if self._updated is not None:
            deadline = time.monotonic() + UPDATE_S
            while not self._updated.query():
                if time.monotonic() > deadline:
                    raise UserError(f"{self._dist.device} has not finished step {self._state.progress.step}")
                time.sleep(0.01)
        if self.changed:
            raise UserError(f"a forward pass changes {self.changed[0]}, and no copy is kept of weights")
        is_shared = not self._own_buffers or self._shared_after == self._state.progress.step
        if not is_shared and self._buffers.changed:
            raise UserError("the model's running statistics, or other buffers, are those of rank 0")
        return self._state.progress.step

    def fingerprint(self) -> int | None:
        with self._own_stream():
            return self._replica_check.fingerprint(self._state)

    def save(self) -> bool:
        self._dist.heartbeat.enter("rescue")
        with self._own_stream():
            kept = {**self._buffers.kept(), **self._extra_states}
            return self._checkpointer.save_alone(self._state, self._data_state, kept)

    def _copied_extra_states(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(
                mapped(module.get_extra_state(), lambda v: v.detach() if isinstance(v, Tensor) else v)
            )
            for name, module in self._keepers.items()
        }

    def _own_stream(self) -> Any:
        """On a GPU, the main thread's stream may wait forever for a rank that is gone."""
        if self._updated is None:
            return nullcontext()
        torch.cuda.set_device(self._dist.device)  # of this thread
        return torch.cuda.stream(torch.cuda.Stream(self._dist.device))


def build_gate(
    config: Config,
    state: TrainState,
    checkpointer: Checkpointer,
    loader: TrainLoader,
    replica_check: ReplicaCheck,
    strategy: Strategy,
    dist: Dist,
) -> Gate:
    """The gate of a run; with `checkpoint.at_fault` the watch is told what to save."""
    if not config.checkpoint.at_fault or dist.watch is None:
        return NoGate(dist.heartbeat)
    kept = KeptStep(
        dist,
        state,
        checkpointer,
        loader,
        replica_check,
        why_not=strategy.not_whole,
        own_buffers=config.train.exact is None,
    )
    dist.watch.ending.saves(kept)
    return NoGate(dist.heartbeat) if kept.why_not else kept


def _keepers_of_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose extra state forward passes may change, by its name in a save."""
    return {
        f"{name}._extra_state".lstrip("."): module
        for name, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
