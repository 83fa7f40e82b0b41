"""What this process saves without the others at a fault: its state after the last finished step."""

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer import accelerator
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.config import Config
from trainer.data.loading.loaders import TrainLoader
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.optim.plain_names import keepers_of_extra_state, named_buffers, places_of_buffers
from trainer.optim.train_state import TrainState
from trainer.strategies.base import Strategy
from trainer.tensors.bits import same_bits
from trainer.tensors.nested import mapped

_UPDATE_S = 10.0  # for an update that has begun, at a fault
_SMALL_BYTES = 1 << 20


class KeptBuffers:
    """Copies of a model's buffers as they were after the last step: forward passes change them.

    All small ones are copied after each step, and large ones, such as masks, if torch has counted a change.

    Attributes:
        have_changed: whether any was ever changed, perhaps by a forward pass that is under way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = places_of_buffers(model)
        live = {name: self._buffer(name) for name in self._places}
        self._large = {name: buffer for name, buffer in live.items() if buffer.nbytes > _SMALL_BYTES}
        self._versions = {name: buffer._version for name, buffer in self._large.items()}
        self._large = {name: buffer.detach().clone() for name, buffer in self._large.items()}
        small = [name for name in live if name not in self._large]
        kinds = {(live[name].device, live[name].dtype) for name in small}
        self._kinds = [
            [name for name in small if (live[name].device, live[name].dtype) == kind] for kind in kinds
        ]
        self._small = self._first = self._packed()
        self._large_changed = False

    def keep(self) -> None:
        if self._kinds:
            self._small = self._packed()
        for name, kept in self._large.items():
            buffer = self._buffer(name)
            if buffer._version != self._versions[name]:
                self._versions[name], self._large_changed = buffer._version, True
                kept.copy_(buffer.detach())

    @property
    def have_changed(self) -> bool:
        if self._large_changed or any(
            self._buffer(name)._version != version for name, version in self._versions.items()
        ):
            return True
        return not all(map(same_bits, self._packed(), self._first))

    def kept(self) -> Mapping[str, Tensor]:
        """By name in the model.

        Raises:
            UserError: a large one has changed without a count, as by numpy(): its former value is lost; or a
                forward pass has made another buffer, which has no copy.
        """
        if {name for name, _ in named_buffers(self._model)} != self._places.keys():
            raise UserError("a forward pass has made or removed buffers")
        for name, kept in self._large.items():
            buffer = self._buffer(name)
            if buffer._version == self._versions[name] and not same_bits(buffer.detach(), kept):
                raise UserError(f"{name} is changed in a way that torch does not count")
        found = dict(self._large)
        for names, packed in zip(self._kinds, self._small, strict=True):
            live = [self._buffer(name) for name in names]
            parts = packed.split([buffer.numel() for buffer in live])
            found |= {name: part.view(b.shape) for name, part, b in zip(names, parts, live, strict=True)}
        return found

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back.

        Raises:
            UserError: as from `kept`.
        """
        for name, value in self.kept().items():
            self._buffer(name).copy_(value)

    def _packed(self) -> list[Tensor]:
        """Copies of the small buffers, those of a dtype and device in one: a model may have hundreds."""
        return [
            torch.cat([self._buffer(name).detach().reshape(-1) for name in names]) for names in self._kinds
        ]

    def _buffer(self, name: str) -> Tensor:
        buffer: Tensor = getattr(*self._places[name])
        return buffer


class Gate:
    """Keeps updates and a save at a fault apart. This one, of a run that saves nothing then, is open."""

    changed_weights: Sequence[str] = ()
    """Parameters, by name, that a forward pass changes, as the dry run found: no copy is kept of these."""

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the update of `step`, until it is counted."""
        yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within `update`, around a wait for the device, which may wait for a rank that is gone.

        The update is queued at most, and nothing is counted.
        """
        yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around any other change of what a checkpoint holds, which an exception must leave whole."""
        yield

    def note_shared_buffers(self) -> None:
        """Called once in each step, when all ranks have the buffers that rank 0 had after the step before."""


class KeptStep(Gate):
    """The gate of a run that saves at a fault, and the `faults.fault_save.LastStep` that the watch saves.

    The watch's thread saves while the main thread may still be at work. It takes the lock and never gives it
    back: no update begins while it reads, and it waits for one that has begun. An update waits for no other
    rank, so that wait is short. On a GPU one may be queued behind the other ranks' gradients: the state is
    then of the step before, until these have come.

    Args:
        own_buffers: whether ranks have different buffers, of which those of rank 0 are the model's.
    """

    def __init__(
        self,
        dist: Dist,
        state: TrainState,
        checkpointer: Checkpointer,
        loader: TrainLoader,
        own_buffers: bool,
    ) -> None:
        self._dist, self._state, self._checkpointer, self._loader = dist, state, checkpointer, loader
        self._own_buffers = own_buffers and dist.rank != 0
        self._buffers = KeptBuffers(state.model)
        self._shared_after = -1  # the step after which the kept buffers were those of rank 0
        self._keepers = keepers_of_extra_state(state.model)
        self._extra_states = self._copied_extra_states()
        self._data_state: dict[str, Any] = {}
        self._stream = accelerator.stream(dist.device)  # made now: a full GPU has no room for another
        self._copied = accelerator.event(dist.device)
        self._gradients_came, self._is_queued = accelerator.event(dist.device), False
        self._lock, self._frozen = threading.Lock(), False

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        self._lock.acquire()
        self._gradients_came.record()
        yield  # an exception leaves the lock held: the state is then of no step
        if not self._own_buffers:
            self._buffers.keep()
        self._extra_states = self._copied_extra_states()
        self._data_state = self._loader.state_dict()
        self._copied.record()  # on a GPU all of it is still under way
        self._dist.heartbeat.finished = step
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

    def note_shared_buffers(self) -> None:
        if self._own_buffers and self._state.average is None:  # averages of buffers are not shared
            with self.held():
                self._buffers.keep()
                self._shared_after = self._state.progress.step
                self._copied.record()  # on a GPU all of it is still under way

    def freeze(self, failed: bool) -> int:
        self._frozen = self._frozen or self._locked(0.5 if failed else _UPDATE_S)
        step = self._state.progress.step
        if not self._frozen:
            doing = f"was within an update, or evaluated averages, after step {step}"
            raise UserError(f"rank {self._dist.rank} {doing}")
        deadline = time.monotonic() + _UPDATE_S
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise UserError(f"{self._dist.device} has not finished step {step}")
            time.sleep(0.01)
        if self.changed_weights:
            name = self.changed_weights[0]
            raise UserError(f"a forward pass changes {name}, and no copy is kept of weights")
        is_shared = not self._own_buffers or self._shared_after == step
        with self._own_stream():
            if not is_shared and self._buffers.have_changed:
                raise UserError("the model's running statistics, or other buffers, are those of rank 0")
        return step

    def save(self) -> bool:
        self._dist.heartbeat.enter("fault_save")
        with self._own_stream():
            kept = {**self._buffers.kept(), **self._extra_states}
            return self._checkpointer.save_alone(self._state, self._data_state, kept, self._check_whole)

    def _locked(self, timeout_s: float) -> bool:
        """Take the lock when no update is under way; False if one still is at the end."""
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
        """Called when all is written, before it has its name."""
        if self._update_began():
            raise UserError("the gradients of the next step came while it was written")

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._lock.release()

    def _copied_extra_states(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(
                mapped(module.get_extra_state(), lambda v: v.detach() if isinstance(v, Tensor) else v)
            )
            for name, module in self._keepers.items()
        }

    def _own_stream(self) -> Any:
        """On a GPU, the main thread's stream may wait forever for a rank that is gone."""
        accelerator.use(self._dist.device)  # of this thread
        return accelerator.on(self._stream)


def build_gate(
    config: Config,
    state: TrainState,
    checkpointer: Checkpointer,
    loader: TrainLoader,
    strategy: Strategy,
    dist: Dist,
) -> Gate:
    """The gate of a run; with `checkpoint.at_fault` the watch is told what to save."""
    if not config.checkpoint.at_fault or dist.watch is None:
        return Gate()
    ending = dist.watch.ending
    ending.save.why_not = strategy.not_whole
    if strategy.not_whole is not None:
        return Gate()
    ending.save.last_step = kept = KeptStep(
        dist, state, checkpointer, loader, own_buffers=config.train.exact is None
    )
    if config.distributed.shrink:  # a rank may die before the next step, too
        dist.heartbeat.finished = state.progress.step
    return kept
