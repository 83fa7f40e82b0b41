"""Which combination comes next: all of a grid, or what Optuna suggests."""

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import UserError
from trainer.sweep.settings import SweepConfig
from trainer.sweep.space import Choice, Interval, Setting, grid

_JOURNAL, _STUDY = "optuna.journal", "ringmaster"


class Proposal:
    """A combination of values, as overrides, run once for each seed."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = tuple(overrides)

    def report(self, value: float, step: int) -> bool:
        """Report the metric at a step; True if the trial should be pruned."""
        return False


class Search(Protocol):
    by_log: frozenset[str]
    """The settings that are searched on a log scale."""

    def ask(self) -> Proposal | None:
        """The next combination; None if there are no more."""

    def tell(self, proposal: Proposal, value: float | None, pruned: bool = False) -> None:
        """Report the result: the metric's mean over the seeds; None without one."""

    def num_left(self) -> int:
        """How many combinations `ask` will, or may, still return."""


class GridSearch:
    by_log: frozenset[str] = frozenset()

    def __init__(self, settings: Sequence[Setting], trials: int | None) -> None:
        self.combinations = list(grid(settings))[:trials]
        self._pending = deque(self.combinations)

    def leave_out(self, combinations: Sequence[list[str]]) -> None:
        self._pending = deque(one for one in self._pending if one not in combinations)

    def ask(self) -> Proposal | None:
        return Proposal(self._pending.popleft()) if self._pending else None

    def tell(self, proposal: Proposal, value: float | None, pruned: bool = False) -> None:
        pass

    def num_left(self) -> int:
        return len(self._pending)


class OptunaProposal(Proposal):
    def __init__(self, overrides: Sequence[str], trial: Any) -> None:
        super().__init__(overrides)
        self.trial = trial

    def report(self, value: float, step: int) -> bool:
        self.trial.report(value, step)
        return bool(self.trial.should_prune())


class OptunaSearch:
    """Random or TPE search by Optuna's ask and tell; its only state is its journal in the sweep's folder.

    A trial without a result, because the sweep was killed, is asked for first.
    """

    def __init__(
        self, wanted: SweepConfig, settings: Sequence[Setting], folder: Path, seed: int | None
    ) -> None:
        kind, metric, mode = wanted.search, wanted.metric, wanted.mode
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise UserError(
                f"hydra.sweeper.search={kind} needs Optuna: pip install 'ringmaster-trainer[sweep]'"
            ) from error
        if not settings:
            raise UserError(
                f"hydra.sweeper.search={kind} has nothing to search: give a setting more than one value"
            )
        optuna.logging.set_verbosity(logging.WARNING)
        _mend(folder / _JOURNAL)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / _JOURNAL)))
        space = {setting.key: str(setting) for setting in settings} | {"metric": metric, "mode": mode}
        self._optuna, self._settings, self._trials = optuna, settings, wanted.trials or 20
        self.by_log = frozenset(one.key for one in settings if isinstance(one, Interval) and one.log)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study = optuna.create_study(
                storage=storage,
                study_name=_STUDY,
                load_if_exists=True,
                direction="minimize" if mode == "min" else "maximize",
                pruner=optuna.pruners.MedianPruner(),
            )
            asked = self._study.get_trials(deepcopy=False)
            begin = None if seed is None else seed + len(asked)
            self._study.sampler = (
                optuna.samplers.TPESampler(seed=begin)
                if kind == "tpe"
                else optuna.samplers.RandomSampler(seed=begin)
            )
        if self._study.user_attrs.setdefault("space", space) != space:
            raise UserError(
                f"{folder} holds a search through other settings, or for another metric: set another "
                "hydra.sweep.dir"
            )
        self._study.set_user_attr("space", space)
        states = optuna.trial.TrialState
        for trial in asked:
            if trial.state == states.RUNNING:  # asked for first
                self._study.enqueue_trial(trial.params)
                self._study.tell(trial.number, state=states.FAIL)
        self._num_asked = sum(trial.state in (states.COMPLETE, states.PRUNED) for trial in asked)

    def ask(self) -> Proposal | None:
        if self._num_asked >= self._trials:
            return None
        self._num_asked += 1
        trial = self._study.ask()
        return OptunaProposal([f"{one.key}={self._suggest(trial, one)}" for one in self._settings], trial)

    def tell(self, proposal: Proposal, value: float | None, pruned: bool = False) -> None:
        assert isinstance(proposal, OptunaProposal)
        states = self._optuna.trial.TrialState
        if pruned:
            self._study.tell(proposal.trial, state=states.PRUNED)
        elif value is None:
            self._study.tell(proposal.trial, state=states.FAIL)
        else:
            self._study.tell(proposal.trial, value)

    def num_left(self) -> int:
        return self._trials - self._num_asked

    def _suggest(self, trial: Any, setting: Setting) -> str:
        if isinstance(setting, Choice):
            if not setting.ordered:
                return str(trial.suggest_categorical(setting.key, setting.values))
            return setting.values[trial.suggest_int(f"{setting.key} (index)", 0, len(setting.values) - 1)]
        if isinstance(setting.low, int) and isinstance(setting.high, int):
            return str(trial.suggest_int(setting.key, setting.low, setting.high, log=setting.log))
        return repr(trial.suggest_float(setting.key, setting.low, setting.high, log=setting.log))


def _mend(journal: Path) -> None:
    """Cut off an incomplete last line: a line appended to it could not be read."""
    if journal.exists():
        whole = journal.read_bytes().rpartition(b"\n")
        if whole[2]:
            journal.write_bytes(whole[0] + whole[1])
