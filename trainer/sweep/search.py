"""What a sweep searches, and which combination comes next: all of a grid, or what Optuna suggests."""

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hydra.core.override_parser.types import IntervalSweep, Override

from trainer.errors import UserError
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import FINAL, TrialLog, mean


@dataclass(frozen=True)
class Choice:
    """A list, choice(), glob() or, `ordered`, a range(); values as on a command line."""

    key: str
    values: tuple[str, ...]
    ordered: bool


@dataclass(frozen=True)
class Interval:
    """interval(low, high), of integers if both are: int(interval(1, 8)); log by tag(log, ...)."""

    key: str
    low: float
    high: float
    log: bool


Setting = Choice | Interval


def split(overrides: Iterable[Override]) -> tuple[list[str], list[Setting]]:
    """Split a command line into the overrides common to all trials, and the swept settings.

    Raises:
        UserError: a swept setting without values.
    """
    fixed: list[str] = []
    swept: list[Setting] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            assert override.input_line is not None
            fixed.append(override.input_line)
        elif override.is_interval_sweep():
            swept.append(_interval(key, override))
        else:
            values = tuple(dict.fromkeys(override.sweep_string_iterator()))
            if not values:
                raise UserError(f"{override.input_line} leaves no value for {key}")
            swept.append(Choice(key, values, ordered=override.is_range_sweep()))
    return fixed, swept


def _interval(key: str, override: Override) -> Interval:
    interval = override.value()
    assert isinstance(interval, IntervalSweep) and interval.start is not None and interval.end is not None
    low, high, log = interval.start, interval.end, "log" in interval.tags
    if unknown := interval.tags - {"log"}:
        raise UserError(f"{override.input_line} is tagged {', '.join(sorted(unknown))}; the only tag is log")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise UserError(
            f"{override.input_line} must go from a number to a larger one" + ", both above 0" * log
        )
    return Interval(key, low, high, log)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A combination of values, as overrides, run once for each seed; `asked` is Optuna's trial."""

    overrides: tuple[str, ...]
    asked: Any = None


class Search(Protocol):
    def ask(self) -> Proposal | None:
        """The next combination; None if there are no more."""

    def tell(self, proposal: Proposal, value: float | None) -> None:
        """Report the result: the metric's mean over the seeds; None without one."""

    def num_left(self) -> int:
        """How many combinations `ask` will, or may, still return."""


class GridSearch:
    """Every combination, the last setting changing first.

    Raises:
        UserError: an interval, which has no grid.
    """

    def __init__(self, settings: Sequence[Setting], trials: int | None) -> None:
        axes = []
        for setting in settings:
            if isinstance(setting, Interval):
                raise UserError(
                    f"{setting.key}=interval(...) has no grid: use range() or a list, or "
                    "hydra.sweeper.search=random or tpe"
                )
            axes.append([f"{setting.key}={value}" for value in setting.values])
        self.combinations = deque(itertools.islice(itertools.product(*axes), trials))

    def ask(self) -> Proposal | None:
        return Proposal(self.combinations.popleft()) if self.combinations else None

    def tell(self, proposal: Proposal, value: float | None) -> None:
        pass

    def num_left(self) -> int:
        return len(self.combinations)


class OptunaSearch:
    """Random or TPE search by Optuna's ask and tell. It learns what ran before from the trial log.

    A combination that was stopped, has died, or ran when the sweep was killed, is asked for first.
    """

    def __init__(
        self, wanted: SweepConfig, settings: Sequence[Setting], log: TrialLog, seed: int | None
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(
                f"hydra.sweeper.search={wanted.search} needs Optuna: pip install 'ringmaster-trainer[sweep]'"
            ) from error
        if not settings:
            raise UserError(
                f"hydra.sweeper.search={wanted.search} has nothing to search: give a setting more than one "
                "value"
            )
        optuna.logging.set_verbosity(logging.WARNING)
        before = list(log.combinations([setting.key for setting in settings]))
        sampler = optuna.samplers.TPESampler if wanted.search == "tpe" else optuna.samplers.RandomSampler
        self._study = optuna.create_study(
            direction="minimize" if wanted.mode == "min" else "maximize",
            sampler=sampler(seed=None if seed is None else seed + len(before)),
        )
        self._optuna, self._settings, self._num_left = optuna, settings, wanted.trials or 20
        self._space = {setting.key: self._distribution(setting) for setting in settings}
        for swept, trials in before:
            params = {one.key: _param(one, swept[one.key]) for one in settings}
            if None in params.values():
                continue  # of an earlier command line, with other values
            if len(trials) < wanted.seeds or any(trial.state not in FINAL for trial in trials):
                self._study.enqueue_trial(params)
                continue
            self._num_left -= 1
            if (value := mean(trials)) is not None:
                known = optuna.trial.create_trial(params=params, distributions=self._space, value=value)
                self._study.add_trial(known)

    def ask(self) -> Proposal | None:
        if self._num_left <= 0:
            return None
        self._num_left -= 1
        trial = self._study.ask(self._space)
        chosen = (f"{one.key}={_text(one, trial.params[one.key])}" for one in self._settings)
        return Proposal(tuple(chosen), trial)

    def tell(self, proposal: Proposal, value: float | None) -> None:
        failed = self._optuna.trial.TrialState.FAIL if value is None else None
        self._study.tell(proposal.asked, value, state=failed)

    def num_left(self) -> int:
        return max(0, self._num_left)

    def _distribution(self, setting: Setting) -> Any:
        of = self._optuna.distributions
        if isinstance(setting, Choice):
            if setting.ordered:
                return of.IntDistribution(0, len(setting.values) - 1)  # the index
            return of.CategoricalDistribution(setting.values)
        whole = isinstance(setting.low, int) and isinstance(setting.high, int)
        kind = of.IntDistribution if whole else of.FloatDistribution
        return kind(setting.low, setting.high, log=setting.log)


def _text(setting: Setting, param: Any) -> str:
    """A parameter of Optuna's as a value of the command line; `_param` is the inverse."""
    if isinstance(setting, Choice):
        return setting.values[param] if setting.ordered else str(param)
    return repr(param)


def _param(setting: Setting, text: str) -> Any:
    """None if it is not one of the setting's values."""
    if isinstance(setting, Choice):
        if text not in setting.values:
            return None
        return setting.values.index(text) if setting.ordered else text
    whole = isinstance(setting.low, int) and isinstance(setting.high, int)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return None
    return value if setting.low <= value <= setting.high else None
