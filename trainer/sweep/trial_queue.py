"""The trials to come: what the search proposes, once for each seed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config
from trainer.config.overrides import in_words
from trainer.errors import UserError
from trainer.sweep import trial_log
from trainer.sweep.search import GridSearch, Proposal, Search
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trial_log import Trial, TrialLog

_REFUSED_IN_A_ROW = 50
_REFUSALS = (UserError, HydraException, OmegaConfBaseException)
Compose = Callable[[Sequence[str]], Config]


@dataclass
class Planned:
    """A trial to be run."""

    trial: Trial
    proposal: Proposal
    config: Config


class TrialQueue:
    """Asks the search for no more than one proposal ahead, as it learns from each result.

    Args:
        common: the overrides of all trials.
        compose: returns the validated settings of a trial with these overrides.
        say: prints a line.
    """

    def __init__(
        self,
        settings: SweepConfig,
        search: Search,
        trials: TrialLog,
        common: Sequence[str],
        compose: Compose,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._search, self._trial_log = settings, search, trials
        self._common, self._compose, self._say = list(common), compose, say
        self._queue: deque[Planned] = deque()
        self._running: list[Trial] = []
        self._repeats: dict[Proposal, list[Trial]] = {}  # proposals whose result the search does not know yet
        self._good: Proposal | None = None  # the first that could be composed

    def __len__(self) -> int:
        return len(self._queue)

    def leave_out_contradictions(self, search: GridSearch) -> None:
        """Leave out combinations that contradict.

        Raises:
            UserError: a value fits no combination.
        """
        refused: list[tuple[list[str], str]] = []
        good: set[str] = set()
        for combination in search.combinations:
            try:
                self._compose([*self._common, *combination])
                good.update(combination)
            except _REFUSALS as error:
                refused.append((combination, _words(error)))
        for combination, message in refused:
            if not good.issuperset(combination) or not combination:
                raise UserError(message)
            self._say(f"left out: {' '.join(combination)}: {message}")
        search.leave_out([combination for combination, _ in refused])

    def next(self) -> Planned | None:
        """The next trial, which stays at the head of the queue; None if there are no more.

        Raises:
            UserError: no trial can be run any more.
        """
        num_refused = 0
        while not self._queue:
            if (proposal := self._search.ask()) is None:
                return None
            try:
                self._plan(proposal)
            except _REFUSALS as error:
                if changed := self._what_changed():
                    raise UserError(
                        f"the settings changed during the sweep, and fit no trial now: {changed}"
                    ) from error
                self._search.tell(proposal, None)
                self._say(f"left out: {' '.join(proposal.overrides)}: {_words(error)}")
                num_refused += 1
                if num_refused == _REFUSED_IN_A_ROW:
                    raise UserError(
                        f"{num_refused} trials in a row cannot be run, the last one: {_words(error)}"
                    ) from error
        return self._queue[0]

    def _what_changed(self) -> str | None:
        """The error of a trial that was valid before; then conf/ or the code was edited."""
        try:
            if self._good is not None:
                self._compose([*self._common, *self._good.overrides])
        except _REFUSALS as error:
            return _words(error)
        return None

    def _plan(self, proposal: Proposal) -> None:
        """Queue the runs of a proposal that are not final."""
        config = self._compose([*self._common, *proposal.overrides])
        self._good = self._good or proposal
        seeds: list[int | None] = [config.seed]
        if self._settings.seeds > 1:
            first = config.seed or 0
            seeds = list(range(first, first + self._settings.seeds))
        self._repeats[proposal] = trials = []
        for seed in seeds:
            common = [*self._common, f"seed={seed}"] if self._settings.seeds > 1 else self._common
            trial = self._trial_log.trial(common, proposal.overrides, seed)
            trials.append(trial)
            if trial.state not in trial_log.FINAL:
                self._queue.append(Planned(trial, proposal, config))
        self._tell_if_over(proposal)

    def started(self) -> None:
        """The trial at the head runs now."""
        self._running.append(self._queue.popleft().trial)

    def again(self, planned: Planned) -> None:
        """A trial has ended, and is to run once more, first of all."""
        self._running.remove(planned.trial)
        self._queue.appendleft(planned)

    def ended(self, planned: Planned) -> None:
        """A trial has ended; the search is told once all repeats of its proposal have."""
        self._running.remove(planned.trial)
        self._tell_if_over(planned.proposal)

    def _tell_if_over(self, proposal: Proposal) -> None:
        """Tell the search once all repeats of a proposal have ended; a stopped one will be resumed."""
        trials = self._repeats[proposal]
        alive = {id(trial) for trial in (*self._running, *(planned.trial for planned in self._queue))}
        if any(id(trial) in alive for trial in trials):
            return
        states = {trial.state for trial in trials}
        if states <= {*trial_log.FINAL, trial_log.DIED}:
            done = (trial for trial in trials if trial.state == trial_log.DONE)
            values = [trial.value for trial in done if trial.value is not None]
            mean = sum(values) / len(values) if len(values) == len(trials) else None
            self._search.tell(proposal, mean, pruned=trial_log.PRUNED in states)
            del self._repeats[proposal]


def _words(error: Exception) -> str:
    return in_words(error) if isinstance(error, HydraException | OmegaConfBaseException) else str(error)
