"""Saving and resuming a run, agreed among all ranks."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.background import InBackground, host_stager
from trainer.checkpoint.expected import Expected
from trainer.checkpoint.listing import Retention
from trainer.checkpoint.made_buffers import compare_buffers
from trainer.checkpoint.matching import is_extra_state
from trainer.checkpoint.matching_values import check_resumable
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.remote import NoRemote, Remote
from trainer.checkpoint.resuming import Resuming
from trainer.checkpoint.state_file import DATA_STATES
from trainer.checkpoint.state_parts import StateParts
from trainer.checkpoint.store import Store
from trainer.checkpoint.writing import Contents, SaveLayout, layout_of, write_checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement, Alone
from trainer.distributed.process_group import Dist
from trainer.errors import Fault, UserError, kind_of
from trainer.faults.disk_progress import at_disk
from trainer.files.address import Address
from trainer.files.untrusted import first_five
from trainer.optim.plain_names import buffer_names
from trainer.optim.train_state import Progress, TrainState

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves a ``TrainState`` under ``run_dir/checkpoints`` and restores it.

    Every method but ``due`` and ``minutes_are_over`` is collective. It uses a separate gloo group with a long
    timeout, so that a slow disk does not look like a failed network. All ranks know how each action ended
    before one of them raises.

    Attributes:
        restored_metrics: those saved with the checkpoint that ``restore`` went on from.
        restored_data_states: where the data of each rank stood then.
        last_evaluation: its step and metrics, for saves of that step; changed within `Gate.held`.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        run_dir: Path,
        dist: Dist,
        run_id: str,
        num_samples: int | None,
        config: Mapping[str, Any],
    ) -> None:
        """``run_id`` marks this run's checkpoints in ``run_dir``. ``num_samples`` is the length of the
        training data, None for a stream. ``config`` has the settings by dotted name, as plain values: they
        are saved, and compared on resume.
        """
        self._settings, self._dist = settings, dist
        self._store = Store(Path(run_dir) / "checkpoints", run_id)
        best = settings.keep_best
        self._retention = Retention(
            last=settings.keep_last,
            best=(best.metric, best.mode) if best is not None else None,
            every=settings.keep_every,
        )
        self._remote = NoRemote()
        if settings.remote is not None and dist.rank == 0:
            self._remote = Remote(Address(settings.remote), self._store, self._retention)
        self._agreement = Agreement(dist, settings.timeout_s)
        self._resuming = Resuming(self._store, self._remote.listings, self._agreement, num_samples, config)
        dist.heartbeat.disk_may_take(settings.timeout_s)
        self._facts: dict[str, Any] = {
            "num_samples": num_samples,
            "strategy": config["strategy.name"],
            "world_size": dist.world_size,
            "torch_version": torch.__version__,
            "config": dict(config),
        }
        self._parts: StateParts  # from `expect` on
        self._checked = False
        self._last_saved: int | None = None
        self._last_save_s = time.monotonic()  # or the start
        self._layout: SaveLayout | None = None
        self.restored_metrics: dict[str, float] = {}
        self.restored_data_states: list[dict[str, Any]] = []
        self.last_evaluation: tuple[int, Mapping[str, float]] = (0, {})
        self._in_flight: InBackground | None = None
        self._copied: Future[dict[str, Tensor]] | None = None

    @cached_property
    def _stage(self) -> Callable[[dict[str, Tensor]], Future[dict[str, Tensor]]]:
        return host_stager(self._dist.device)

    def find(self, resume: str | None) -> OpenCheckpoint | None:
        """As `Resuming.find`. Called first, before there is a state."""
        return self._resuming.find(resume)

    def expect(self, state: TrainState, exact: Mapping[str, Any] | None = None) -> None:
        """Note what each save must contain: ``state`` as built, before it is restored or trained.

        Args:
            exact: of an exact run, what decides its bits, in plain values; saved with it.

        Raises:
            UserError: on every rank alike: a checkpoint cannot hold something in the model's state; names it.
        """
        expected = self._agreement.everywhere(lambda: Expected(state))
        for theirs in self._agreement.gather(expected.not_finite):  # each rank checks its own shards
            for name, kinds in theirs.items():
                expected.not_finite.setdefault(name, set()).update(kinds)
        self._parts = StateParts(expected, {**self._facts, "exact": exact})

    def restore(self, state: TrainState, source: OpenCheckpoint) -> None:
        """As `Resuming.restore`."""
        self.restored_data_states = self._resuming.restore(state, source, self._dist.device)
        self.restored_metrics = source.manifest.metrics
        self._store.saved_after = source.manifest.saved_at
        if source.directory.resolve().parent == self._store.root.resolve():
            self._last_saved = state.progress.step

    def check_once(self, state: TrainState) -> None:
        """Called after each step. After the first, check that a resume could load what a save would write.

        Raises:
            UserError: on every rank alike: a forward pass made or resized a buffer, or replaced a parameter;
                or the optimizer keeps what cannot be loaded.
        """
        if not self._checked:
            self._dist.heartbeat.enter("checkpoint")  # ahead of a rank that hangs in its first update
            self._agreement.everywhere(lambda: check_resumable(state, *self._parts.of(state, [])))
            compare_buffers(state.model, self._agreement, self._dist)
            self._remote.follow()
            self._checked = True

    def due(self, progress: Progress, end_of_epoch: bool) -> bool:
        """Whether the settings ask for a checkpoint after this optimizer step, or at this end of an epoch."""
        every_steps, every_epochs = self._settings.every_steps, self._settings.every_epochs
        if every_steps is not None and progress.step % every_steps == 0:
            return True
        return end_of_epoch and every_epochs is not None and progress.epoch % every_epochs == 0

    def minutes_are_over(self) -> bool:
        """Whether `checkpoint.every_minutes` asks for one. Asked on one rank alone: clocks differ."""
        every = self._settings.every_minutes
        return every is not None and time.monotonic() - self._last_save_s >= 60 * every

    def evaluation_of(self, step: int) -> dict[str, float]:
        """The metrics of `last_evaluation` if it was after this step, and else none."""
        of_step, metrics = self.last_evaluation
        return dict(metrics) if of_step == step else {}

    def save(
        self,
        state: TrainState,
        metrics: Mapping[str, float] | None = None,
        data_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save ``state``. ``metrics``, such as those of its evaluation, rank it for ``keep_best``.

        ``data_state`` is where this rank's data stands, in plain values and tensors, if it has to be saved.

        With ``checkpoint.async`` this returns at once. ``state`` is copied to host memory while the next step
        is computed, until ``wait_until_copied``, and is written while training continues. The next ``save``,
        which waits for the previous one, or ``finish_saving`` then raises a failure.

        Raises:
            UserError, Fault: on every rank alike, with the rank that failed and why; the attempt is deleted.
            NonFiniteError: on every rank alike: a number is NaN or Inf; nothing is saved of this step.
        """
        step, metrics = state.progress.step, dict(metrics or {})
        self._last_save_s = time.monotonic()
        if self._last_saved == step:
            return
        self._dist.heartbeat.enter("checkpoint")
        best = self._settings.keep_best
        if metrics and best is not None and best.metric not in metrics:
            raise UserError(f"checkpoint.keep_best.metric is {best.metric}; there is {', '.join(metrics)}")
        self.finish_saving()
        data_states = self._agreement.gather(dict(data_state or {}))
        tensors, facts = self._agreement.everywhere(lambda: self._parts.of(state, data_states))
        compare_buffers(state.model, self._agreement, self._dist)
        of_modules = {name for name in tensors if is_extra_state(name) or name.startswith(f"{DATA_STATES}.")}
        only_rank_0 = buffer_names(state.model) | of_modules
        self._layout = layout_of(
            tensors, self._settings.format, self._agreement, only_rank_0, former=self._layout
        )
        part = self._layout.plan.part_of(tensors, self._dist.rank)
        contents = Contents(step, self._layout, part, facts, metrics)
        self._parts.refuse_not_finite(contents.tensors, step, self._agreement, self._dist)
        self._last_saved = step
        if self._settings.async_:
            copied = self._start_copying(contents.tensors, only_rank_0)
            self._in_flight = InBackground(
                lambda: self._write(replace(contents, tensors=copied.result())), self._dist.device
            )
        else:
            self._write(contents)

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint of this run; not a collective."""
        return next((manifest.step for manifest in self._store.own().values()), None)

    def save_alone(self, state: TrainState, data_state: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
        """`save` without any other rank, after a fault. ``state`` must be whole here.

        ``kept``, by names in the model's state, is saved in place of its own values there. Other ranks' data
        states are left out: what of a stream they read is read again on resume, and dropped.

        Returns:
            False: the newest checkpoint of this run is of this step already.

        Raises:
            UserError, Fault: a number is NaN or Inf, or the disk fails; what was saved before is unchanged.
        """
        step = state.progress.step
        own = [data_state if rank == self._dist.rank else {} for rank in range(self._dist.world_size)]
        tensors, facts = self._parts.of(state, own, kept)
        if bad := sorted(self._parts.expected.new_in(tensors)):
            raise UserError(f"{first_five(bad)} is not finite")
        layout = layout_of(tensors, "full", Alone())
        part = layout.plan.part_of(tensors, rank=0)  # the only one of this plan
        contents = Contents(step, layout, part, facts, self.evaluation_of(step))
        store = Store(self._store.root, self._store.run_id, shared=True)
        store.saved_after = self._store.saved_after
        with store.turn():
            newest = self.newest_step()
            if newest == step:
                return False
            if newest == step + 1:  # behind a cut link: ranks are one step apart at most
                raise UserError(f"the last step here is {step}; another rank has saved step {newest}")
            write_checkpoint(store, contents, Alone())
        return True

    def _start_copying(self, tensors: Mapping[str, Tensor], changing: set[str]) -> Future[dict[str, Tensor]]:
        """Copy buffers now, since a forward pass changes them, and the rest in the background."""
        copies = {name: tensors[name].clone() for name in tensors if name in changing}
        if self._dist.device.type == "cuda":
            torch.cuda.synchronize(self._dist.device)  # the stager's stream waits for no other
        self._copied = self._stage({**tensors, **copies})
        return self._copied

    def wait_until_copied(self) -> None:
        """Called before the parameters change: an asynchronous save may still be copying them."""
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def finish_saving(self) -> None:
        """Wait for what is still being written: at each save, and at the good end of a run.

        Raises:
            UserError, Fault: it could not be written; on every rank alike.
        """
        if self._in_flight is None:
            return
        if not self._in_flight.is_done:
            log.info("waiting for the checkpoint of step %s, which is still being written", self._last_saved)
        in_flight, self._in_flight = self._in_flight, None
        in_flight.wait()

    def metrics(self) -> dict[str, float]:
        """Metrics for the log, by name."""
        return self._remote.metrics()

    def finish_remote(self) -> None:
        """Wait until `checkpoint.remote` has all, at most `checkpoint.timeout_s`; after `finish_saving`.

        No collective: a logger that is slow to close may delay rank 0, while the others just end.
        """
        self._dist.heartbeat.enter("checkpoint")
        with at_disk():
            self._remote.finish(self._settings.timeout_s)

    def _write(self, contents: Contents) -> None:
        step = contents.step
        try:
            write_checkpoint(self._store, contents, self._agreement, clears=self._dist.local_rank == 0)
        except (UserError, Fault) as error:
            self._last_saved = None
            raise kind_of(error)(f"the checkpoint of step {step} could not be saved: {error}") from error
        self._agreement.on_main(lambda: self._written(step))

    def _written(self, step: int) -> None:
        self._remote.follow(step)
        self._store.prune(self._retention, spared=self._remote.in_hand)
