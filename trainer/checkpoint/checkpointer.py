"""Save and restore a run; most methods are collectives of all ranks."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.finding import check_data, log_changed_settings, open_for_resume
from trainer.checkpoint.layout import Plan, plan_save
from trainer.checkpoint.listing import SetAside, all_checkpoints, best_of
from trainer.checkpoint.open_checkpoint import ADAPTERS, LEFT_OUT, MODEL_CONFIG, OpenCheckpoint
from trainer.checkpoint.remote import NoRemote, Remote
from trainer.checkpoint.restoring import load_model, restore
from trainer.checkpoint.savable import Savable, refuse_not_finite
from trainer.checkpoint.save_plan import Draft, Planner, SaveReport
from trainer.checkpoint.store import Store
from trainer.checkpoint.writing import Contents, Saving, host_stager, write_checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement
from trainer.distributed.ranks import Ranks
from trainer.errors import RetryableError, UserError, kind_of, writing
from trainer.failures.heartbeat import at_disk
from trainer.files.address import Address
from trainer.files.untrusted import first_five
from trainer.state.train_state import Progress, TrainState

log = logging.getLogger(__name__)
_UNSAVED = "unsaved"  # the key of `Checkpointer.unsaved` in a checkpoint
_HOURS = "hours"  # the key of the run's duration so far


class Checkpointer:
    """Saves a ``TrainState`` under ``run_dir/checkpoints`` and restores it.

    ``open``, ``bind``, ``check`` and ``save`` are collectives, called in this order. They use a separate gloo
    group with a long timeout, so that a slow disk does not look like a failed network. If an action fails on
    one rank, all ranks raise the same error.

    Attributes:
        saving: the last save, which may still be in progress.
        restored_metrics: the metrics of the state that ``bind`` restored; {} if it was not evaluated.
        unsaved: fingerprints of attributes that checkpoints do not contain, to be recorded by each save.
        verified_step: returns the last step that `train.verify_every` has verified; each save records it.
        restored_verified: the last verified step according to the restored checkpoint; the checkpoint's own
            step if it records none or is from another run directory.
        restored_unsaved: the fingerprints that the restored checkpoint records.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        run_dir: Path,
        ranks: Ranks,
        run_id: str,
        num_samples: int | None,
        config: Mapping[str, Any],
    ) -> None:
        """
        Args:
            run_id: identifies this run's checkpoints in ``run_dir``.
            num_samples: the length of the training data; None for a stream.
            config: the settings as plain values, by dotted name. They are saved, and compared on resume.
        """
        self._settings, self._ranks = settings, ranks
        self._store = Store(Path(run_dir) / "checkpoints", run_id)
        self._evaluations = Evaluations(Path(run_dir))
        self._agreement = Agreement(ranks, settings.timeout_s)
        self._remote = NoRemote()
        if settings.remote is not None and ranks.is_main:
            self._remote = Remote(Address(settings.remote), self._store, settings, self._evaluations)
        ranks.heartbeat.disk_may_take(settings.timeout_s)
        self._facts: dict[str, Any] = {
            "num_samples": num_samples,
            "strategy": config["strategy.name"],
            "world_size": ranks.world_size,
            "torch_version": torch.__version__,
            "config": dict(config),
        }
        self._stage = host_stager(ranks.device)
        self._opened: OpenCheckpoint | None = None
        self._savable: Savable  # set by `bind`
        self._changing: set[str] = set()  # parameters that a forward pass changes
        self._planner: Planner
        self._last_saved: int | None = None
        self._branch = ""
        self._origin = State("", 0)  # the state that the run resumed from, if any
        self.start: str | None = None  # the checkpoint that the run resumed from, if it is not in run_dir
        self._saved: set[State] = set()  # states with a checkpoint of this run, for keep_best
        self._last_save_s = time.monotonic()  # the time of the last save, or of the start
        self.saving = Saving()
        self.restored_metrics: Mapping[str, float] = {}
        self.unsaved: Mapping[str, Any] = {}
        self.restored_unsaved: Mapping[str, Any] = {}
        self.verified_step: Callable[[], int | None] = lambda: None
        self.restored_verified = 0

    def open(self, resume: str | None) -> OpenCheckpoint | None:
        """Verify and return the checkpoint that ``resume`` names; None if there is none.

        Call it before the state is built. Partial files of interrupted saves of this run are deleted.

        Args:
            resume: None; "auto" for the newest intact checkpoint in run_dir; or the path of a checkpoint.

        Raises:
            UserError: on every rank, if the checkpoint is missing, damaged, or from a run with different
                data.
        """
        self._agreement.on_main(self._store.recover)
        if resume is None:
            return None
        source = open_for_resume(resume, self._store, self._settings.remote, self._agreement)
        if source is not None:
            self._agreement.everywhere(lambda: check_data(source, self._facts["num_samples"]))
        self._opened = source
        return source

    def bind(
        self,
        state: TrainState,
        exact: Mapping[str, Any] | None = None,
        frozen: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Prepare to save ``state``, and restore the opened checkpoint, if any, into it.

        Args:
            exact: the `exact_facts` of a run with train.exact, to be saved.
            frozen: the `frozen_digests` of the model. With checkpoint.frozen=false, the parameters in it are
                not saved.

        Returns:
            The data position of each rank in the opened checkpoint; [] without a checkpoint.

        Raises:
            UserError: on every rank, if the model's state cannot be saved, or if the checkpoint cannot be
                read or is from a different model.
        """
        frozen = frozen or {}
        left_out = {} if self._settings.frozen else frozen
        self._savable = self._agreement.everywhere(lambda: Savable(state, left_out))
        self._savable.not_finite.update(*self._agreement.gather(self._savable.not_finite))
        self._planner = Planner(self._savable, self._settings.format, self._ranks)
        self._facts |= {"exact": exact, LEFT_OUT: dict(left_out)}
        self._facts |= {MODEL_CONFIG: self._savable.model_config, ADAPTERS: self._savable.adapters}
        self._branch, before, self._saved = self._agreement.on_main(lambda: self._new_branch(self._opened))
        if self._opened is None:
            return []
        data_states = restore(state, self._opened, frozen, self._agreement)
        state.early_end.continue_after(self._opened.facts.get(_HOURS, 0.0))
        if self._ranks.is_main:
            log_changed_settings(self._opened.facts["config"], self._facts["config"])
        manifest = self._opened.manifest
        self._origin = manifest.state
        self._evaluations.merge(before)
        self._evaluations.start_branch(self._branch, self._origin)
        self.restored_metrics = self._evaluations.of(self._origin)
        self.restored_unsaved = self._opened.facts.get(_UNSAVED, {})
        self._store.saved_after = manifest.saved_at
        verified = manifest.verified if manifest.run_id == self._store.run_id else None
        self.restored_verified = manifest.step if verified is None else verified
        if self._opened.directory.resolve().parent == self._store.root.resolve():
            self._last_saved = state.progress.step
        else:
            self.start = str(self._opened.directory.resolve())
        return data_states

    def _new_branch(self, source: OpenCheckpoint | None) -> tuple[str, Evaluations, set[State]]:
        """Return the name of a new branch, the evaluations before it, and the states that the run saved."""
        run_dir, saved = self._store.root.parent, set[State]()
        evaluations = Evaluations(run_dir)
        if source is not None:
            evaluations.merge(Evaluations.read(run_dir))
            if (origin := source.directory.parent.parent) != run_dir:  # in another run, or at an address
                evaluations.merge(Evaluations.read(origin))
        if source is not None and self._settings.keep_best is not None:
            checkpoints = all_checkpoints(self._store, self._settings.remote)
            saved = {each.manifest.state for each in checkpoints if each.manifest is not None}
        return secrets.token_hex(4), evaluations, saved

    def check(self, state: TrainState, changed: Sequence[str] = ()) -> None:
        """Check, after the dry run, that the run could resume from its checkpoints (a collective).

        Args:
            changed: parameters that the dry run changed on this rank. After a resume, they are read from the
                checkpoint again.

        Raises:
            UserError: on every rank, if a forward pass created or resized a buffer or replaced a parameter,
                or if a rank that writes files cannot reach the directory of checkpoints.
        """
        self._ranks.heartbeat.enter("checkpoint")
        source, self._opened = self._opened, None
        root = self._store.root

        def make_root() -> None:
            with writing(root):
                root.mkdir(parents=True, exist_ok=True)

        def check_save() -> None:
            if self._settings.format == "sharded" and not root.is_dir():
                raise UserError(
                    f"{root} does not exist on this host, but each rank writes its shards of a checkpoint "
                    "there; set run_dir to a directory on a file system that all hosts share"
                )
            self._savable.to_save(state)
            if self._ranks.is_main and source is not None:  # must precede the branch's first checkpoint
                with writing(self._store.root.parent):
                    self._evaluations.write()
            if source is not None and changed:
                load_model(state.model, source)

        self._agreement.on_main(make_root)
        self._agreement.everywhere(check_save)
        self._changing = {f"model.{name}" for name in changed}
        self._remote.follow()

    def refuse_left_out(self, names: Collection[str]) -> None:
        """Raise UserError if checkpoints lack any of the parameters ``names``, which are trainable now."""
        if not_saved := sorted(self._facts[LEFT_OUT].keys() & names):
            raise UserError(
                f"checkpoint.frozen=false does not save {first_five(not_saved)}, because these parameters "
                "were frozen at the start, but they are trainable now; set checkpoint.frozen=true"
            )

    def due(self, progress: Progress, end_of_epoch: bool) -> bool:
        """Return whether the settings ask for a checkpoint after this step, or at the end of this epoch."""
        every_steps, every_epochs = self._settings.every_steps, self._settings.every_epochs
        if every_steps is not None and progress.step % every_steps == 0:
            return True
        return end_of_epoch and every_epochs is not None and progress.epoch % every_epochs == 0

    def minutes_are_over(self) -> bool:
        """Return whether `checkpoint.every_minutes` asks for a save.

        Call on rank 0 only, because clocks differ between ranks.
        """
        every = self._settings.every_minutes
        return every is not None and time.monotonic() - self._last_save_s >= 60 * every

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of the state after ``step``, which are equal on all ranks; rank 0 writes them.

        Returns:
            Whether ``keep_best`` requires a save, because no earlier checkpoint on this branch is better.

        Raises:
            UserError, RetryableError: on rank 0, if writing fails.
        """
        state, best = State(self._branch, step), self._settings.keep_best
        self._evaluations.add(state, metrics)
        if self._ranks.is_main:
            with writing(self._store.root.parent), at_disk():
                self._evaluations.write()
            self._remote.follow()
        return best is not None and self._evaluations.best(state, best, [*self._saved, state]) == state

    def best_so_far(self, step: int) -> tuple[str, float, int] | None:
        """Return the metric that defines the best state, its best value so far, and its step."""
        best = self._settings.best
        state = self._evaluations.best(State(self._branch, step), best)
        return None if state is None else (best.metric, self._evaluations.of(state)[best.metric], state.step)

    def best_or_newest(self) -> Path | None:
        """Return the best checkpoint if ``keep_best`` is set, otherwise the newest. Call on rank 0 only."""
        own, best = self._store.own(), self._settings.keep_best
        chosen = best_of(own, best, self._evaluations) if best is not None else []
        return next(iter([*chosen, *own]), None)

    def save(self, state: TrainState, data_state: Mapping[str, Any] | None = None) -> Saving:
        """Save ``state`` (a collective).

        With ``checkpoint.async``, return immediately: ``state`` is copied to host memory during the next
        forward pass, and written while training continues. Call the returned object's ``wait_until_copied()``
        before changing ``state``. Its ``wait()``, which the next save also calls, raises the errors of the
        save. Older checkpoints are deleted in the background.

        Args:
            data_state: the position in this rank's data, as plain values and tensors, if it must be saved.

        Raises:
            UserError, RetryableError: on every rank. The message names the rank that failed. Files of this
                save are deleted.
            NonFiniteError: on every rank, if a value is NaN or Inf. Nothing is saved.
        """
        step = state.progress.step
        self._last_save_s = time.monotonic()
        if self._last_saved == step:
            return self.saving
        self._ranks.heartbeat.enter("checkpoint")
        self.saving.wait()
        draft: Draft

        def report() -> SaveReport:
            nonlocal draft
            draft = Draft(state, *self._savable.to_save(state))
            return self._planner.report(draft, state, data_state or {})

        def decide(reports: list[SaveReport]) -> tuple[Path, bool]:
            descriptions = [self._ranks.describe(rank) for rank in range(len(reports))]
            refuse_not_finite([each.not_finite for each in reports], step, descriptions)
            return self._store.new_directory(step), draft.add(reports)

        directory, alike = self._agreement.decide_on_rank0(report, decide)
        plan = self._planner.plan(draft, alike)
        part = plan.part_of(draft.tensors, self._ranks.rank)
        self._last_saved = step
        self._saved.add(State(self._branch, step))
        if self._settings.async_:
            copies = self._stage(part, draft.follows_data | self._changing)
            contents = self._contents(state, draft, plan, copies.result)

            def write() -> None:
                self._write(directory, contents)
                self._prune()

            self.saving = Saving(f"the checkpoint of step {step}", copies, write, self._ranks.device)
        else:
            self._write(directory, self._contents(state, draft, plan, lambda: part))
            self.saving = Saving("the deletion of older checkpoints", write=self._prune)
        return self.saving

    def _contents(
        self, state: TrainState, draft: Draft, plan: Plan, tensors: Callable[[], Mapping[str, Tensor]]
    ) -> Contents:
        facts = {**self._facts, **draft.facts, _UNSAVED: self.unsaved, _HOURS: state.early_end.hours()}
        return Contents(state.progress.step, plan, tensors, facts, self._branch, self.verified_step())

    def _write(self, directory: Path, contents: Contents) -> None:
        step = contents.step
        try:
            cleans_up = self._ranks.local_rank == 0
            write_checkpoint(self._store, directory, contents, self._agreement, cleans_up)
        except (UserError, RetryableError) as error:
            self._last_saved = None
            raise kind_of(error)(f"failed to save the checkpoint of step {step}: {error}") from error
        self._remote.follow(step)

    def _prune(self) -> None:
        if self._ranks.is_main:
            try:
                self._store.prune(self._settings, self._evaluations, spared=self._remote.copying)
            except (UserError, RetryableError) as error:
                log.warning("failed to delete older checkpoints: %s", error)

    def _newest_step(self) -> int | None:
        """Return the step of the newest checkpoint in run_dir that led to the current state, if there is one.

        Checkpoints saved later than the one from which the run resumed do not count.
        """
        own = (manifest.state for manifest in self._store.own().values())
        return next((each.step for each in own if each.branch == self._branch or each == self._origin), None)

    def save_alone(
        self,
        state: TrainState,
        data_state: Mapping[str, Any],
        kept: Mapping[str, Any],
        check: Callable[[], None],
    ) -> bool:
        """Save ``state``, which must not be sharded, without the other ranks, after a failure.

        The data positions of other ranks are not saved: on resume, a stream is read again up to this step.

        Args:
            kept: values to save in place of the model's current ones, by their names in the model's state.
            check: called when all files are written; raises if the state has changed in the meantime.

        Returns:
            False if the newest checkpoint of this run already has this step.

        Raises:
            UserError, RetryableError: if a value is NaN or Inf, or writing fails. Existing checkpoints stay
                unchanged.
        """
        step = state.progress.step
        draft = Draft(state, *self._savable.to_save(state, kept))
        draft.add_data_states(
            [data_state if rank == self._ranks.rank else {} for rank in range(self._ranks.world_size)]
        )
        if bad := sorted(self._savable.new_in(draft.tensors)):
            raise UserError(f"NaN or Inf in {first_five(bad)}")
        plan = plan_save(draft.tensors, "full", rank=0, world_size=1)
        contents = self._contents(state, draft, plan, lambda: plan.part_of(draft.tensors, rank=0))
        store = Store(self._store.root, self._store.run_id, shared=True)
        store.saved_after = self._store.saved_after
        newest = self._newest_step()
        if newest == step:
            return False
        if newest == step + 1:  # saved by ranks on the other side of a network failure
            raise UserError(f"this rank is at step {step}, but another rank has saved step {newest}")
        write_checkpoint(store, store.new_directory(step), contents, Agreement(), check=check)
        return True

    def set_aside(self, after: int, why: str) -> None:
        """Record on every rank that resume=auto must skip the checkpoints of this run after step ``after``.

        If the disk fails, log a warning instead of raising an error, because `why` must still reach the user.
        """
        if not self._ranks.is_main:
            return
        run_dir = self._store.root.parent
        try:
            branches = {self._branch, *(manifest.branch for manifest in self._store.own().values())}
            before = self._store.aside
            cut = {branch: min(after, before.after.get(branch, after)) for branch in branches}
            aside = SetAside({**before.after, **cut}, why, before.start or self.start)
            with writing(run_dir):
                aside.write(run_dir)
            self._remote.put_set_aside()
        except (UserError, RetryableError) as error:
            log.warning(
                "could not record that a resume must skip the checkpoints after step %d: %s", after, error
            )

    def metrics(self) -> dict[str, float]:
        return self._remote.metrics()

    def finish_remote(self) -> None:
        """Wait up to `checkpoint.timeout_s` until everything is uploaded to `checkpoint.remote`.

        Call it after ``saving.wait()``. This is not a collective, because rank 0 may be delayed by a slow
        logger.
        """
        self._ranks.heartbeat.enter("checkpoint")
        with at_disk():
            self._remote.finish(self._settings.timeout_s)
