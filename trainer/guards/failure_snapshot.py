"""The failure snapshot: the state after the last finished step, which one rank saves without the others."""

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
from trainer.model.plain_names import keepers_of_extra_state
from trainer.state.train_state import TrainState
from trainer.strategies.base import Strategy
from trainer.tensors.nested import mapped

_UPDATE_S = 10.0  # for an update that has begun when a rank fails


class Snapshot:
    """What a run calls around changes of its state; it keeps nothing, where a failure saves nothing."""

    def note_changed_weights(self, names: Sequence[str]) -> None:
        """Called after a dry run with the parameters that a forward pass changes: no copy is kept of them."""

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Enclose the update of `step`, until it is counted."""
        yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enclose, within `update`, a wait for the device, which may never end if another rank is gone.

        Until then the update may be queued on the device, and nothing of it is counted.
        """
        yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Enclose any other change of the state that a checkpoint contains."""
        yield


class FailureSnapshot(Snapshot):
    """The state after the last finished step: the `failures.save_on_failure.LastStep` that the watch saves.

    The watch's thread saves while the main thread may still be running. It takes the lock and never gives it
    back, so that no update begins while it reads. It waits for an update that has begun. That wait is short,
    because within `update` no rank waits for another, where each has the whole state. On a GPU an update may
    be queued behind the gradients of other ranks: until these arrive, the state is that of the previous step.
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
        self._keepers = keepers_of_extra_state(state.model)
        self._extra_states = self._copied_extra_states()
        self._data_state: dict[str, Any] = {}
        self._stream = accelerator.stream(ranks.device)  # made now: a full GPU has no room for another
        self._copied = accelerator.event(ranks.device)
        self._gradients_came, self._is_queued = accelerator.event(ranks.device), False
        self._lock, self._frozen = threading.Lock(), False
        self._changed_weights: Sequence[str] = ()

    # ---- called by the main thread

    def note_changed_weights(self, names: Sequence[str]) -> None:
        self._changed_weights = names

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        self._lock.acquire()
        self._gradients_came.record()
        yield  # an exception leaves the lock held: the state is then of no step
        self._extra_states = self._copied_extra_states()
        self._data_state = self._loader.state_dict()
        self._copied.record()  # on a GPU all of it is still under way
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
    def held(self) -> Iterator[None]:
        with self._lock:
            yield

    # ---- called by the watch's threads

    def freeze(self, failed: bool) -> int:
        self._frozen = self._frozen or self._locked(0.5 if failed else _UPDATE_S)
        step = self._state.progress.step
        if not self._frozen:
            doing = f"was within an update, or evaluated averages, after step {step}"
            raise UserError(f"rank {self._ranks.rank} {doing}")
        deadline = time.monotonic() + _UPDATE_S
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise UserError(f"{self._ranks.device} has not finished step {step}")
            time.sleep(0.01)
        if self._changed_weights:
            raise UserError(
                f"a forward pass changes {self._changed_weights[0]}, and no copy is kept of weights"
            )
        return step

    def save(self) -> bool:
        self._ranks.heartbeat.enter("save_on_failure")
        with self._own_stream():
            kept = {**self._buffers.kept(), **self._extra_states}
            return self._checkpointer.save_alone(self._state, self._data_state, kept, self._check_whole)

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._lock.release()

    def _locked(self, timeout_s: float) -> bool:
        """Take the lock while no update is being made; return False if one still is at the end."""
        deadline = time.monotonic() + timeout_s
        while self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            if not self._update_began():
                return True
            self._lock.release()  # the main thread counts it now
            time.sleep(0.01)
        return False

    def _update_began(self) -> bool:
        return self._is_queued and self._gradients_came.query()

    def _check_whole(self) -> None:
        """Called when everything is written, before the checkpoint has its name."""
        if self._update_began():
            raise UserError("the gradients of the next step came while it was written")

    def _copied_extra_states(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(
                mapped(module.get_extra_state(), lambda v: v.detach() if isinstance(v, Tensor) else v)
            )
            for name, module in self._keepers.items()
        }

    def _own_stream(self) -> Any:
        """On a GPU, the main thread's stream may wait forever for a rank that is gone."""
        accelerator.use(self._ranks.device)  # of this thread
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
    """Return copies of the buffers, if the run needs them, and the snapshot, which the watch saves."""
    at_failure = failure_save if config.checkpoint.on_failure else None
    if at_failure is not None:
        at_failure.why_not = strategy.not_whole
    if at_failure is None or strategy.not_whole is not None:
        restores = (
            config.train.skip_nonfinite and config.train.precision != "fp16"
        )  # whose overflows keep buffers
        return KeptBuffers(state.model) if restores else None, Snapshot()
    buffers = KeptBuffers(state.model)
    at_failure.last_step = snapshot = FailureSnapshot(ranks, state, buffers, checkpointer, loader)
    if config.distributed.shrink:  # a rank may die before the next step, too
        ranks.heartbeat.finished = state.progress.step
    return buffers, snapshot
