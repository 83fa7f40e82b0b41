"""The failure snapshot: the state after the last finished step, which one rank saves after a failure."""

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trainer import accelerator
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.config import Config
from trainer.data.loading.loaders import TrainLoader
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.failures.save_on_failure import SaveOnFailure
from trainer.guards.kept_buffers import KeptBuffers
from trainer.model.plain_names import modules_with_extra_state
from trainer.state.train_state import TrainState
from trainer.strategies.base import Strategy
from trainer.tensors.nested import mapped

_UPDATE_S = 10.0  # time to finish an update that is in progress when a rank fails


class Snapshot:
    """The interface of `FailureSnapshot`, for runs that do not save on failure."""

    def note_changed_weights(self, names: Sequence[str]) -> None:
        """Note the parameters that a forward pass changes, of which the snapshot has no copies."""

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Return the context for the update of `step`; exit it after `Progress` has counted the step."""
        yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return the context for a wait for the device within `update`.

        The wait never ends if another rank that the device waits for has died. The update may be queued on
        the device, but its step is not counted yet.
        """
        yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """Return the context for any other change to the state that a checkpoint contains."""
        yield


class FailureSnapshot(Snapshot):
    """The state after the last finished step, which the watch saves as a `LastStep`.

    The watch's thread saves while the main thread may still be running. It acquires the lock and keeps it, so
    that no update starts during the save. If an update is in progress, it waits. That wait is short, because
    ranks that have the whole state do not wait for each other within `update`. On a GPU, an update may be
    queued behind the gradients of other ranks; until these arrive, the state is that of the previous step.
    """

    def __init__(
        self,
        ranks: Ranks,
        state: TrainState,
        buffers: KeptBuffers,
        checkpointer: Checkpointer,
        loader: TrainLoader,
    ) -> None:
        self._ranks, self._state, self._buffers = ranks, state, buffers
        self._checkpointer, self._loader = checkpointer, loader
        self._keepers = modules_with_extra_state(state.model)
        self._extra_states = self._copied_extra_states()
        self._data_state: dict[str, Any] = {}
        self._stream = accelerator.stream(ranks.device)  # created now, while the GPU has memory for it
        self._copied = accelerator.event(ranks.device)
        self._gradients_arrived, self._is_queued = accelerator.event(ranks.device), False
        self._lock, self._frozen = threading.Lock(), False
        self._changed_weights: Sequence[str] = ()

    # ---- called by the main thread

    def note_changed_weights(self, names: Sequence[str]) -> None:
        self._changed_weights = names

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        self._lock.acquire()
        self._gradients_arrived.record()
        yield  # after an exception the lock stays locked, because the state is inconsistent
        self._extra_states = self._copied_extra_states()
        self._data_state = self._loader.state_dict()
        self._copied.record()  # on a GPU, the update and the copies are still running
        self._ranks.heartbeat.finished = step
        self._lock.release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._is_queued = True
        self._lock.release()
        yield
        self._lock.acquire()
        self._is_queued = False

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._lock:
            yield

    # ---- called by the watch's threads

    def freeze(self, failed: bool) -> int:
        self._frozen = self._frozen or self._lock_between_updates(0.5 if failed else _UPDATE_S)
        step = self._state.progress.step
        if not self._frozen:
            raise UserError(
                f"rank {self._ranks.rank} was updating weights or evaluating averages after step {step}"
            )
        deadline = time.monotonic() + _UPDATE_S
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise UserError(f"{self._ranks.device} has not finished step {step}")
            time.sleep(0.01)
        if self._changed_weights:
            raise UserError(
                f"a forward pass changes {self._changed_weights[0]}, and no copy from before the pass exists"
            )
        return step

    def save(self) -> bool:
        self._ranks.heartbeat.enter("save_on_failure")
        with self._own_stream():
            kept = {**self._buffers.kept(), **self._extra_states}
            return self._checkpointer.save_alone(
                self._state, self._data_state, kept, self._check_no_update_started
            )

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._lock.release()

    def _lock_between_updates(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            if not self._update_started():
                return True
            self._lock.release()  # so that the main thread can finish the update
            time.sleep(0.01)
        return False

    def _update_started(self) -> bool:
        return self._is_queued and self._gradients_arrived.query()

    def _check_no_update_started(self) -> None:
        """Raise UserError if the next update has started; called just before the checkpoint is published."""
        if self._update_started():
            raise UserError("the gradients of the next step arrived during the save")

    def _copied_extra_states(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(
                mapped(module.get_extra_state(), lambda v: v.detach() if isinstance(v, Tensor) else v)
            )
            for name, module in self._keepers.items()
        }

    def _own_stream(self) -> Any:
        """Within the context, use a separate stream: the main thread's may wait forever for a dead rank."""
        accelerator.use(self._ranks.device)  # the current device is per thread
        return accelerator.on(self._stream)


def build_snapshot(
    config: Config,
    state: TrainState,
    checkpointer: Checkpointer,
    loader: TrainLoader,
    strategy: Strategy,
    ranks: Ranks,
    failure_save: SaveOnFailure | None,
) -> tuple[KeptBuffers | None, Snapshot]:
    """Return copies of the buffers, if the run needs them, and the snapshot for the watch to save."""
    on_failure = failure_save if config.checkpoint.on_failure else None
    if on_failure is not None:
        on_failure.why_not = strategy.incomplete_reason
    if on_failure is None or strategy.incomplete_reason is not None:
        # In fp16, a step that overflows keeps the buffers that it has changed.
        restores = config.train.skip_nonfinite and config.train.precision != "fp16"
        return KeptBuffers(state.model) if restores else None, Snapshot()
    buffers = KeptBuffers(state.model)
    on_failure.last_step = snapshot = FailureSnapshot(ranks, state, buffers, checkpointer, loader)
    if config.distributed.shrink:  # a rank may die before the first step
        ranks.heartbeat.finished = state.progress.step
    return buffers, snapshot
