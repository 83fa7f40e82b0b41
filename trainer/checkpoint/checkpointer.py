"""Saving and resuming a run, agreed among all ranks."""

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.alone import write_alone
from trainer.checkpoint.background import InBackground, host_stager
from trainer.checkpoint.expected import Expected
from trainer.checkpoint.hashing import FileDigest, write_text
from trainer.checkpoint.layout import Plan, index_to_json, plan
from trainer.checkpoint.listing import Retention
from trainer.checkpoint.matching import first_five, of_modules_own
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.remote import NoRemote, Remote
from trainer.checkpoint.resuming import Resuming
from trainer.checkpoint.state_file import DATA_STATES, MODEL_CONFIG, STATE, check_size
from trainer.checkpoint.store import Store
from trainer.checkpoint.tree import take_apart
from trainer.checkpoint.writing import write_tensors
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement
from trainer.distributed.process_group import Dist
from trainer.errors import NonFiniteError, UserError
from trainer.faults.heartbeat import at_disk
from trainer.files.address import Address
from trainer.files.untrusted import check_parts
from trainer.optim.train_state import Progress, TrainState, buffer_names

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves a ``TrainState`` under ``run_dir/checkpoints`` and restores it.

    Every method but ``due`` is collective. It uses a separate gloo group with a long timeout, so that a slow
    disk does not look like a failed network. All ranks know how each action ended before one of them raises.

    Attributes:
        restored_metrics: those saved with the checkpoint that ``restore`` went on from.
        restored_data_states: where the data of each rank stood then.
        exact: of an exact run, what decides its bits (plain values); kept.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        run_dir: Path,
        dist: Dist,
        *,
        run_id: str,
        num_samples: int | None,
        strategy: str,
        config: Mapping[str, Any],
    ) -> None:
        """``run_id`` marks this run's checkpoints in ``run_dir``. ``num_samples`` is the length of the
        training data, None for a stream. ``config`` has the settings by dotted name, as plain values: they
        are saved, and compared on resume.
        """
        self._settings, self._dist = settings, dist
        self._num_samples, self._strategy, self._config = num_samples, strategy, dict(config)
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
        self._resuming = Resuming(
            self._store, self._remote.listings, self._agreement, num_samples, self._config
        )
        dist.heartbeat.disk_may_take(settings.timeout_s)
        self._last_saved: int | None = None
        self._expected: Expected | None = None
        self._checked = False
        self.restored_metrics: dict[str, float] = {}
        self.restored_data_states: list[dict[str, Any]] = []
        self.exact: dict[str, Any] | None = None
        self._in_flight: InBackground | None = None
        self._copied: Future[dict[str, Tensor]] | None = None

    @cached_property
    def _stage(self) -> Callable[[dict[str, Tensor]], Future[dict[str, Tensor]]]:
        return host_stager(self._dist.device)

    def begin(self, state: TrainState) -> None:
        """Note what a save has to contain, from ``state`` as built. Called before it is restored or trained.

        Raises:
            UserError: on every rank alike: a checkpoint cannot hold something in the model's state; names it.
        """
        expected = self._agreement.everywhere(lambda: Expected(state))
        for theirs in self._agreement.gather(expected.not_finite):  # each rank checks its own shards
            for name, kinds in theirs.items():
                expected.not_finite.setdefault(name, set()).update(kinds)
        self._expected = expected

    def check_once(self, state: TrainState) -> None:
        """Called after each step. After the first, check that a resume could load what a save would write.

        Raises:
            UserError: on every rank alike: a forward pass made or resized a buffer, or replaced a parameter.
        """
        if not self._checked:
            self._agreement.everywhere(lambda: self._taken_apart(state))
            self._remote.follow()
            self._checked = True

    def _taken_apart(self, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self._expected is not None:
            self._expected.check_parameters(state.model)
        tensors, plain = take_apart(state.state_dict())
        if self._expected is not None:
            self._expected.check(tensors)
        return tensors, plain

    def due(self, progress: Progress, end_of_epoch: bool) -> bool:
        """Whether the settings ask for a checkpoint after this optimizer step, or at this end of an epoch."""
        every_steps, every_epochs = self._settings.every_steps, self._settings.every_epochs
        if every_steps is not None and progress.step % every_steps == 0:
            return True
        return end_of_epoch and every_epochs is not None and progress.epoch % every_epochs == 0

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
        which waits for the previous one, or ``close`` then raises a failure.

        Raises:
            UserError: on every rank alike, with the rank that failed and why; the attempt is deleted.
            NonFiniteError: on every rank alike: a number is NaN or Inf; nothing is saved of this step.
        """
        step, metrics = state.progress.step, dict(metrics or {})
        if self._last_saved == step:
            return
        self._dist.heartbeat.enter("checkpoint")
        best = self._settings.keep_best
        if metrics and best is not None and best.metric not in metrics:
            raise UserError(f"checkpoint.keep_best.metric is {best.metric}; there is {', '.join(metrics)}")
        self._finish()
        tensors, plain = self._agreement.everywhere(lambda: self._taken_apart(state))
        everyones = self._agreement.gather(dict(data_state or {}))
        of_data, data_states = take_apart({DATA_STATES: everyones if self._dist.rank == 0 else []})
        own = buffer_names(state.model) | {name for name in tensors if of_modules_own(name)} | set(of_data)
        tensors |= of_data
        who = plan(tensors, own, self._settings.format == "full", self._agreement)
        facts = self._facts(plain, data_states)
        if self._dist.rank == 0:
            facts["tensors"] = index_to_json(who.index(tensors))
        tensors = who.part_of(tensors, self._dist.rank)
        self._refuse_not_finite(tensors, step)
        self._last_saved = step
        if self._settings.async_:
            copied = self._start_copying(tensors, own)
            self._in_flight = InBackground(
                lambda: self._write(step, copied.result(), who, facts, metrics), self._dist.device
            )
        else:
            self._write(step, tensors, who, facts, metrics)

    def is_saved(self, step: int) -> bool:
        """Whether the newest checkpoint of this run is of `step`; not a collective."""
        return next((m.step for m in self._store.own().values()), None) == step

    def save_alone(
        self,
        state: TrainState,
        metrics: Mapping[str, float],
        data_state: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """`save` without any other rank, after a fault. ``state`` must be whole here.

        ``buffers``, by their names in the model, are saved in place of its own. Other ranks' data states are
        left out: what of a stream they read is read again on resume, and dropped.

        Raises:
            UserError: a number is NaN or Inf; nothing is saved.
            OSError: as from `write_alone`.
        """
        tensors, plain = self._taken_apart(state)
        changed = {
            f"{part}.{name}": value for part in ("model", "buffers") for name, value in buffers.items()
        }
        tensors |= {name: value for name, value in changed.items() if name in tensors}
        if self._expected is not None and (bad := sorted(self._expected.new_in(tensors))):
            raise UserError(f"{first_five(bad)} is not finite")
        own = [data_state if rank == self._dist.rank else {} for rank in range(self._dist.world_size)]
        of_data, data_states = take_apart({DATA_STATES: own})
        store = Store(self._store.root, self._store.run_id, shared=True)
        write_alone(store, state.progress.step, tensors | of_data, self._facts(plain, data_states), metrics)

    def _refuse_not_finite(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Raise NonFiniteError on every rank if any has a NaN or Inf that was not there at the start."""
        found = self._agreement.gather({} if self._expected is None else self._expected.new_in(tensors))
        for rank, theirs in enumerate(found):
            for name, kinds in theirs.items():
                more = f" (and {len(theirs) - 1} more)" if len(theirs) > 1 else ""
                kind, where = " and ".join(sorted(kinds)), self._dist.describe(rank)
                raise NonFiniteError(
                    f"{name.removeprefix('model.')}{more} holds {kind} after step {step} on {where}; nothing "
                    "of that step is saved. Lower optim.lr, or set train.clip_grad_norm; resume=auto goes on "
                    "from the checkpoint before",
                    ranks=(rank,),
                )

    def _start_copying(self, tensors: dict[str, Tensor], buffers: set[str]) -> Future[dict[str, Tensor]]:
        """Copy buffers now, since a forward pass changes them, and the rest in the background."""
        changing = {name: tensors[name].clone() for name in tensors if name in buffers}
        if self._dist.device.type == "cuda":
            torch.cuda.synchronize(self._dist.device)  # the stager's stream waits for no other
        self._copied = self._stage(tensors | changing)
        return self._copied

    def wait_until_copied(self) -> None:
        """Called before the parameters change: an asynchronous save may still be copying them."""
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def delete_leftovers(self) -> None:
        """As `Resuming.delete_leftovers`."""
        self._resuming.delete_leftovers()

    def find(self, resume: str | None) -> OpenCheckpoint | None:
        """As `Resuming.find`."""
        return self._resuming.find(resume)

    def restore(self, state: TrainState, source: OpenCheckpoint) -> None:
        """As `Resuming.restore`."""
        self.restored_data_states = self._resuming.restore(state, source, self._dist.device)
        self.restored_metrics = source.manifest.metrics
        if source.directory.resolve().parent == self._store.root.resolve():
            self._last_saved = state.progress.step

    def close(self) -> None:
        """Wait for what is still being written. Called when a run ends well, not after an exception.

        Raises:
            UserError: it could not be written; on every rank alike.
        """
        self._finish()

    def metrics(self) -> dict[str, float]:
        """Metrics for the log, by name."""
        return self._remote.metrics()

    def finish_remote(self) -> None:
        """Wait until `checkpoint.remote` has all, at most `checkpoint.timeout_s`; after `close`.

        No collective: a logger that is slow to close may delay rank 0, while the others just end.
        """
        self._dist.heartbeat.enter("checkpoint")
        with at_disk():
            self._remote.finish(self._settings.timeout_s)

    def _finish(self) -> None:
        if self._in_flight is None:
            return
        if not self._in_flight.is_done:
            log.info("waiting for the checkpoint of step %s, which is still being written", self._last_saved)
        in_flight, self._in_flight = self._in_flight, None
        in_flight.wait()

    # ---- writing

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        who: Plan,
        facts: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        directory = None
        try:
            directory = self._agreement.on_main(lambda: self._store.begin(step))
            digests = self._agreement.everywhere(lambda: self._write_part(directory, tensors, who, facts))
            files = {
                name: digest for part in self._agreement.gather(digests) for name, digest in part.items()
            }
            check_size(files[STATE].bytes, sum(file.bytes for file in files.values()))
            self._agreement.on_main(lambda: self._store.commit(step, self._settings.format, files, metrics))
        except UserError as error:
            self._last_saved = None
            # On each host, since the hosts may have no disk in common.
            if directory is not None and self._dist.local_rank == 0:
                self._store.abandon(directory)
            raise UserError(f"the checkpoint of step {step} could not be saved: {error}") from error
        self._agreement.on_main(lambda: self._sealed(step))

    def _sealed(self, step: int) -> None:
        self._remote.follow(step)
        self._store.prune(self._retention, spared=self._remote.in_hand)

    def _write_part(
        self, directory: Path, tensors: Mapping[str, Tensor], who: Plan, facts: dict[str, Any]
    ) -> dict[str, FileDigest]:
        digests = write_tensors(directory, tensors, who, self._dist.rank, self._agreement.group)
        if self._dist.rank == 0:
            text = json.dumps(facts)
            check_parts(STATE, text.encode())  # a resume would refuse it
            digests[STATE] = write_text(directory / STATE, text)
        return digests

    def _facts(self, plain: dict[str, Any], data_states: dict[str, Any]) -> dict[str, Any]:
        return {
            "num_samples": self._num_samples,
            "strategy": self._strategy,
            "world_size": self._dist.world_size,
            "torch_version": torch.__version__,
            "config": self._config,
            "state": plain,
            "exact": self.exact,
            **data_states,
            "not_finite": sorted(self._expected.not_finite) if self._expected is not None else [],
            MODEL_CONFIG: self._expected.model_config if self._expected is not None else None,
        }
