"""Saving and resuming a run, agreed among all ranks: `open`, `bind` and `save`."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.finding import check_data, opened_for, tell_what_changed
from trainer.checkpoint.layout import Plan, plan_save
from trainer.checkpoint.listing import all_found, best_of
from trainer.checkpoint.open_checkpoint import ADAPTERS, LEFT_OUT, MODEL_CONFIG, OpenCheckpoint
from trainer.checkpoint.remote import Copier, NoRemote, Remote
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
_HOURS = "hours"  # the key of how long the run has taken


class Checkpointer:
    """Saves a ``TrainState`` under ``run_dir/checkpoints`` and restores it.

    ``open``, ``bind``, ``check`` and ``save`` are collective, and called in this order. They use a separate
    gloo group with a long timeout, so that a slow disk does not look like a failed network. All ranks know
    how each action ended before one of them raises.

    Attributes:
        saving: the last save, which may still be written.
        restored_metrics: the metrics of the state that ``bind`` restored; {} if it was not evaluated.
        unsaved: the fingerprints of attributes that no checkpoint contains, for each save of this process.
        restored_unsaved: those of the checkpoint that ``bind`` restored.
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
        """``run_id`` marks this run's checkpoints in ``run_dir``. ``num_samples`` is the length of the
        training data, None for a stream. ``config`` has the settings by dotted name, as plain values: they
        are saved, and compared on resume.
        """
        self._settings, self._ranks = settings, ranks
        self._store = Store(Path(run_dir) / "checkpoints", run_id)
        self._evaluations = Evaluations(Path(run_dir))
        self._agreement = Agreement(ranks, settings.timeout_s)
        self._remote = self._remote_of(settings)
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
        self._savable: Savable  # from `bind` on
        self._changing: set[str] = set()  # parameters that a forward pass changes
        self._planner: Planner
        self._last_saved: int | None = None
        self._branch, self._origin = "", State("", 0)  # of the run; and what it resumed from, if it did
        self._saved: set[State] = set()  # by this run: what keep_best may compare an evaluation with
        self._last_save_s = time.monotonic()  # or the start
        self.saving = Saving()
        self.restored_metrics: Mapping[str, float] = {}
        self.unsaved: Mapping[str, Any] = {}
        self.restored_unsaved: Mapping[str, Any] = {}

    def _remote_of(self, settings: CheckpointConfig) -> NoRemote:
        if settings.remote is None:
            return NoRemote()
        address, session = Address(settings.remote), self._agreement.on_main(lambda: secrets.token_hex(8))
        hosts, rank = self._ranks.hosts, self._ranks.rank
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        if rank == 0:
            return Remote(address, self._store, session, here, settings, self._evaluations)
        leads = rank == here[0] and settings.format == "sharded"
        return Copier(address, self._store, session, here) if leads else NoRemote()

    def open(self, resume: str | None) -> OpenCheckpoint | None:
        """The checkpoint that ``resume`` asks to continue from, verified; None if there is none.

        Called first, before there is a state. Deletes what killed saves of this run left behind.

        Args:
            resume: None; "auto" for the newest checkpoint of this run_dir that verifies; or the path of one.

        Raises:
            UserError: on every rank alike: the checkpoint is missing, damaged, or of a run on other data.
        """
        self._agreement.on_main(self._store.recover)
        if resume is None:
            return None
        source = opened_for(resume, self._store, self._settings.remote, self._agreement)
        if source is not None:
            found, num_samples = source, self._facts["num_samples"]
            self._agreement.everywhere(lambda: check_data(found, num_samples))
        self._opened = source
        return source

    def bind(
        self,
        state: TrainState,
        exact: Mapping[str, Any] | None = None,
        frozen: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Save ``state``, as built, from now on; first restore what was opened, if it fits.

        Args:
            exact: of an exact run, what decides its bits, in plain values; saved with it.
            frozen: the `frozen_digests` of the model: with checkpoint.frozen=false saves leave these out.

        Returns:
            Where the data of each rank stood in what was opened; none if nothing was.

        Raises:
            UserError: on every rank alike: a checkpoint cannot hold something in the model's state, by name;
                or what was opened is of another model, or cannot be read.
        """
        frozen = frozen or {}
        left_out = {} if self._settings.frozen else frozen
        self._savable = self._agreement.everywhere(lambda: Savable(state, left_out))
        self._savable.not_finite.update(*self._agreement.gather(self._savable.not_finite))
        self._planner = Planner(self._savable, self._settings.format, self._ranks)
        self._facts |= {"exact": exact, LEFT_OUT: dict(left_out)}
        self._facts |= {MODEL_CONFIG: self._savable.model_config, ADAPTERS: self._savable.adapters}
        self._branch, before, self._saved = self._agreement.on_main(lambda: self._before(self._opened))
        if self._opened is None:
            return []
        data_states = restore(state, self._opened, frozen, self._agreement, self._ranks.device)
        state.early_end.continue_after(self._opened.facts.get(_HOURS, 0.0))
        if self._ranks.is_main:
            tell_what_changed(self._opened.facts["config"], self._facts["config"])
        self._origin = self._opened.manifest.state
        self._evaluations.merge(before)
        self._evaluations.start_branch(self._branch, self._origin)
        self.restored_metrics = self._evaluations.of(self._origin)
        self.restored_unsaved = self._opened.facts.get(_UNSAVED, {})
        self._store.saved_after = self._opened.manifest.saved_at
        if self._opened.directory.resolve().parent == self._store.root.resolve():
            self._last_saved = state.progress.step
        return data_states

    def _before(self, source: OpenCheckpoint | None) -> tuple[str, Evaluations, set[State]]:
        """Return a new branch, the evaluations before it, and the states that this run has saved."""
        run_dir, saved = self._store.root.parent, set[State]()
        evaluations = Evaluations(run_dir)
        if source is not None:
            evaluations.merge(Evaluations.read(run_dir))
            if (origin := source.directory.parent.parent) != run_dir:  # of another run, or at an address
                evaluations.merge(Evaluations.read(origin))
        if source is not None and self._settings.keep_best is not None:
            found = all_found(self._store, self._settings.remote)
            saved = {each.manifest.state for each in found if each.manifest is not None}
        return secrets.token_hex(4), evaluations, saved

    def check(self, state: TrainState, changed: Sequence[str] = ()) -> None:
        """Check, after the dry run, that a resume could load what a save would write (a collective).

        Args:
            changed: parameters that the dry run changed on this rank. After a resume the model is read
                again then, so that they have the values of the checkpoint.

        Raises:
            UserError: on every rank alike: a forward pass made or resized a buffer, or replaced a parameter;
                or ranks that are to write cannot reach the directory.
        """
        self._ranks.heartbeat.enter("checkpoint")
        source, self._opened = self._opened, None
        root = self._store.root

        def make_root() -> None:
            with writing(root):
                root.mkdir(parents=True, exist_ok=True)

        def look() -> None:
            if self._settings.format == "sharded" and not root.is_dir():
                raise UserError(
                    f"{root} does not exist here, but each rank writes its part of a checkpoint there: is "
                    "run_dir on a file system that all hosts share?"
                )
            self._savable.to_save(state)
            if self._ranks.is_main and source is not None:  # before a checkpoint names the branch
                with writing(self._store.root.parent):
                    self._evaluations.write()
            if source is not None and changed:
                load_model(state.model, source, self._ranks.device)

        self._agreement.on_main(make_root)
        self._agreement.everywhere(look)
        self._changing = {f"model.{name}" for name in changed}
        self._remote.follow()

    def refuse_left_out(self, names: Collection[str]) -> None:
        """Raise UserError if saves leave out one of these parameters, which are trained from now on."""
        if found := sorted(self._facts[LEFT_OUT].keys() & names):
            raise UserError(
                f"checkpoint.frozen=false leaves out {first_five(found)}, frozen at the start and trainable "
                "now; set checkpoint.frozen=true"
            )

    def due(self, progress: Progress, end_of_epoch: bool) -> bool:
        """Whether the settings ask for a checkpoint after this optimizer step, or at this end of an epoch."""
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
        """Record the metrics of the state after ``step``, the same on every rank, on rank 0's disk.

        Returns:
            Whether ``keep_best`` asks to save this state, because no ancestor with a checkpoint was better.

        Raises:
            UserError, RetryableError: on rank 0: the disk fails.
        """
        state, best = State(self._branch, step), self._settings.keep_best
        self._evaluations.add(state, metrics)
        if self._ranks.is_main:
            with writing(self._store.root.parent), at_disk():
                self._evaluations.write()
            self._remote.follow()
        return best is not None and self._evaluations.best(state, best, [*self._saved, state]) == state

    def best_so_far(self, step: int) -> tuple[str, float, int] | None:
        """Return the metric that decides, its best value up to ``step`` and the step that had it, if any."""
        best = self._settings.best
        state = self._evaluations.best(State(self._branch, step), best)
        return None if state is None else (best.metric, self._evaluations.of(state)[best.metric], state.step)

    def best_or_newest(self) -> Path | None:
        """Return the best checkpoint if ``keep_best`` is set, otherwise the newest one; on rank 0 only."""
        own, best = self._store.own(), self._settings.keep_best
        chosen = best_of(own, best, self._evaluations) if best is not None else []
        return next(iter([*chosen, *own]), None)

    def save(self, state: TrainState, data_state: Mapping[str, Any] | None = None) -> Saving:
        """Save ``state``.

        ``data_state`` is where this rank's data stands, in plain values and tensors, if it has to be saved.

        With ``checkpoint.async`` this returns at once. ``state`` is copied to host memory while the next step
        is computed, until ``wait_until_copied()``, and is written while training continues. ``wait()``, for
        which the next save waits, then raises a failure. Older checkpoints are
        always deleted while training continues.

        Each rank reports to rank 0, which answers where to write. When all have written, each reports what it
        wrote, and rank 0 answers how the save ended.

        Raises:
            UserError, RetryableError: on every rank alike, naming the rank that failed and why; what was
                written is deleted.
            NonFiniteError: on every rank alike: a number is NaN or Inf; nothing is saved of this step.
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
            hosts = [self._ranks.describe(rank) for rank in range(len(reports))]
            refuse_not_finite([of_rank.not_finite for of_rank in reports], step, hosts)
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
        return Contents(state.progress.step, plan, tensors, facts, self._branch)

    def _write(self, directory: Path, contents: Contents) -> None:
        step = contents.step
        try:
            write_checkpoint(
                self._store, directory, contents, self._agreement, clears=self._ranks.local_rank == 0
            )
        except (UserError, RetryableError) as error:
            self._last_saved = None
            raise kind_of(error)(f"the checkpoint of step {step} could not be saved: {error}") from error
        self._remote.follow(step)

    def _prune(self) -> None:
        """Delete older checkpoints on rank 0, while training continues: thousands of files take seconds."""
        if self._ranks.is_main:
            try:
                self._store.prune(self._settings, self._evaluations, spared=self._remote.in_hand)
            except (UserError, RetryableError) as error:
                log.warning("older checkpoints stay: %s", error)

    def _newest_step(self) -> int | None:
        """The step of the newest checkpoint here that led to the present state.

        A run that was resumed from an older one left the later ones behind.
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
        """`save` without any other rank, after a failure. ``state`` must be whole here.

        ``kept``, by names in the model's state, is saved in place of its own values there. Other ranks' data
        states are left out: what of a stream they read is read again on resume, and dropped. ``check`` is
        called when all is written, and raises if the state has changed meanwhile.

        Returns:
            False: the newest checkpoint of this run is of this step already.

        Raises:
            UserError, RetryableError: a number is NaN or Inf, or the disk fails; existing checkpoints are
                unchanged.
        """
        step = state.progress.step
        draft = Draft(state, *self._savable.to_save(state, kept))
        draft.add_data_states(
            [data_state if rank == self._ranks.rank else {} for rank in range(self._ranks.world_size)]
        )
        if bad := sorted(self._savable.new_in(draft.tensors)):
            raise UserError(f"{first_five(bad)} is not finite")
        plan = plan_save(draft.tensors, "full", rank=0, world_size=1)
        contents = self._contents(state, draft, plan, lambda: plan.part_of(draft.tensors, rank=0))
        store = Store(self._store.root, self._store.run_id, shared=True)
        store.saved_after = self._store.saved_after
        newest = self._newest_step()
        if newest == step:
            return False
        if newest == step + 1:  # behind a cut link: ranks are one step apart at most
            raise UserError(f"the last step here is {step}; another rank has saved step {newest}")
        write_checkpoint(store, store.new_directory(step), contents, Agreement(), check=check)
        return True

    def metrics(self) -> dict[str, float]:
        """Metrics for the log, by name."""
        return self._remote.metrics()

    def finish_remote(self) -> None:
        """Wait until `checkpoint.remote` has all, at most `checkpoint.timeout_s`; after ``saving.wait()``.

        No collective: a logger that is slow to close may delay rank 0, while the others just end.
        """
        self._ranks.heartbeat.enter("checkpoint")
        with at_disk():
            self._remote.finish(self._settings.timeout_s)
