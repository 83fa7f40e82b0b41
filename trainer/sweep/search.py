"""The settings of a sweep (hydra.sweeper), and the search for combinations of values."""

import itertools
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import MISSING
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, at_least, matching, one_of
from trainer.config.overrides import explain
from trainer.errors import UserError, first_line, optional
from trainer.sweep.trials import PRUNED, Combination, Trial, TrialLog, values_of, words_of

say = partial(print, flush=True)


@dataclass
class SweepConfig:
    """The settings in hydra.sweeper; their defaults are in conf/hydra/sweeper/."""

    search: str = one_of("grid", "random", "tpe")
    trials: int | None = at_least(1)
    metric: str = MISSING
    mode: str = one_of("min", "max")
    concurrent: str = matching(r"auto|0*[1-9][0-9]*", "auto or a number of trials")
    seeds: int = at_least(1)
    pruning: str | None = one_of("median", "asha")
    params: dict[str, str] | None = None


def with_settings(
    combinations: Iterable[Combination], compose: Callable[[Combination], tuple[Combination, Config]]
) -> Iterator[tuple[Combination, Config | str]]:
    """Yield each distinct combination with its config, or with the error message, which is also printed.

    Args:
        compose: returns a combination without the settings that do not exist for its other choices, and its
            config. Of combinations that become equal, only the first is yielded.
    """
    seen = set()
    for combination in combinations:
        composed: Config | str
        try:
            combination, composed = compose(combination)
        except (UserError, HydraException, OmegaConfBaseException) as error:
            composed = str(error) if isinstance(error, UserError) else explain(error)
        if (words := " ".join(words_of(combination))) not in seen:
            seen.add(words)
            if isinstance(composed, str):
                say(f"skipped: {words}: {composed}")
            yield combination, composed


def grid(swept: Sequence[Override]) -> Iterator[Combination]:
    """Return every combination of the values; the last setting changes fastest. Intervals raise UserError."""
    axes = {}
    for override in swept:
        key = override.get_key_element()
        if override.is_interval_sweep():
            way_out = "use a list or range(), or set hydra.sweeper.search to random or tpe"
            raise UserError(f"{key}=interval(...) has no grid of values; {way_out}")
        axes[key] = list(override.sweep_string_iterator())
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def suggestions(
    wanted: SweepConfig, swept: Sequence[Override], log: TrialLog, seed: int | None
) -> Iterator[Combination]:
    """Yield combinations from Optuna's random or TPE search, which rereads the trial log before each one.

    Combinations that were stopped, died, or were running when the sweep was killed come first.
    """
    optuna = optional("optuna", f"hydra.sweeper.search={wanted.search}", extra="sweep")
    optuna.logging.set_verbosity(logging.WARNING)
    space = {one.get_key_element(): _distribution(one, optuna.distributions) for one in swept}
    kinds = {key: type(of.low) if hasattr(of, "low") else str for key, of in space.items()}
    sampler = optuna.samplers.TPESampler if wanted.search == "tpe" else optuna.samplers.RandomSampler

    def known() -> Iterator[tuple[list[Trial], Any]]:
        """Yield, for each combination, its trials and the Optuna trial that represents them."""
        for trials in log.combinations(space):
            outcome: dict[str, Any] = {"state": optuna.trial.TrialState.FAIL}
            if len(values := values_of(trials)) == len(trials):
                outcome = {"value": statistics.fmean(values)}
            elif pruned := [trial for trial in trials if trial.state == PRUNED]:
                evaluated = enumerate(log.evaluations(pruned[0]).values(), 1)
                outcome = {"state": optuna.trial.TrialState.PRUNED, "intermediate_values": dict(evaluated)}
            swept = {key: value for key in space if (value := trials[0].swept[key]) is not None}
            try:
                params = {key: kinds[key](value) for key, value in swept.items()}
                of = {key: space[key] for key in params}
                yield trials, optuna.trial.create_trial(params=params, distributions=of, **outcome)
            except ValueError:  # from an earlier command line, which swept other values
                continue

    before = list(known())
    for trials, _ in before:
        if len(trials) < wanted.seeds or not all(map(log.is_final, trials)):
            yield {key: trials[0].swept[key] for key in space}
    for number in range(len(before), wanted.trials or 20):
        study = optuna.create_study(
            direction="minimize" if wanted.mode == "min" else "maximize",
            sampler=sampler(seed=None if seed is None else seed + number),
        )
        study.add_trials([outcome for _, outcome in known()])
        yield {key: str(value) for key, value in study.ask(space).params.items()}


def _distribution(override: Override, of: Any) -> Any:
    """Return Optuna's distribution for an interval, or for a list of values, as text.

    An interval has only integers if both ends are, as in int(interval(1, 8)). With tag(log, ...), it is
    logarithmic.
    """
    value = override.value()
    try:
        if not isinstance(value, IntervalSweep):
            return of.CategoricalDistribution(list(override.sweep_string_iterator()))
        if others := value.tags - {"log"}:
            raise ValueError(f"the tag {others.pop()} is unknown; the only tag is log")
        whole = all(isinstance(end, int) for end in (value.start, value.end))
        kind = of.IntDistribution if whole else of.FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    except ValueError as error:
        raise UserError(f"{override.input_line}: {first_line(error)}") from error
