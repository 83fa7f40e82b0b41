"""Which combination of a sweep's settings comes next: all of a grid, or what Optuna suggests."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config.overrides import in_words
from trainer.errors import UserError, first_line
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import FINAL, Trial, TrialLog, mean

Combination = tuple[str, ...]  # overrides, one for each swept setting
REFUSALS = (UserError, HydraException, OmegaConfBaseException)


def reason(error: Exception) -> str:
    """Why settings were refused, in one line."""
    return str(error) if isinstance(error, UserError) else in_words(error)


def grid(
    wanted: SweepConfig, swept: Sequence[Override], compose: Callable[[Combination], object]
) -> Iterator[Combination]:
    """Every combination, the last setting changing first; those that contradict are named and left out.

    All are composed before the first runs, since a mistake should not end a sweep after hours.

    Raises:
        UserError: an interval, which has no grid; or a value fits no combination.
    """
    axes = []
    for override in swept:
        key = override.get_key_element()
        if override.is_interval_sweep():
            way_out = "use range() or a list, or hydra.sweeper.search=random or tpe"
            raise UserError(f"{key}=interval(...) has no grid: {way_out}")
        axes.append([f"{key}={value}" for value in _values(override)])
    valid, refused = list[Combination](), dict[Combination, str]()
    for combination in itertools.islice(itertools.product(*axes), wanted.trials):
        try:
            compose(combination)
            valid.append(combination)
        except REFUSALS as error:
            refused[combination] = reason(error)
    fitting = {word for combination in valid for word in combination}
    for combination, why in refused.items():
        if not combination or not fitting.issuperset(combination):
            raise UserError(why)
        print(f"left out: {' '.join(combination)}: {why}", flush=True)
    return iter(valid)


def suggestions(
    wanted: SweepConfig, swept: Sequence[Override], log: TrialLog, seed: int | None
) -> Iterator[Combination]:
    """Random or TPE search by Optuna, which learns what has run from the trial log before each suggestion.

    A combination that was stopped, has died, or ran when the sweep was killed, comes first.

    Raises:
        UserError: there is no Optuna, or nothing that it can search.
    """
    try:
        import optuna
    except ImportError as error:
        way_out = "pip install 'ringmaster-trainer[sweep]'"
        raise UserError(f"hydra.sweeper.search={wanted.search} needs Optuna: {way_out}") from error
    if not swept:
        way_out = "give a setting more than one value"
        raise UserError(f"hydra.sweeper.search={wanted.search} has nothing to search: {way_out}")
    optuna.logging.set_verbosity(logging.WARNING)
    space = {one.get_key_element(): _distribution(one, optuna.distributions) for one in swept}
    sampler = optuna.samplers.TPESampler if wanted.search == "tpe" else optuna.samplers.RandomSampler

    def known() -> Iterator[tuple[dict[str, Any], list[Trial]]]:
        for values, trials in log.combinations(list(space)):
            params = {key: _param(values[key], space[key]) for key in space}
            if None not in params.values():  # else of an earlier command line, with other values
                yield params, trials

    def suggest() -> Iterator[Combination]:
        before = list(known())
        for params, trials in before:
            if len(trials) < wanted.seeds or any(trial.state not in FINAL for trial in trials):
                yield tuple(f"{key}={params[key]}" for key in space)
        for number in range(len(before), wanted.trials or 20):
            study = optuna.create_study(
                direction="minimize" if wanted.mode == "min" else "maximize",
                sampler=sampler(seed=None if seed is None else seed + number),
            )
            for params, trials in known():
                if (value := mean(trials)) is not None:
                    told = optuna.trial.create_trial(params=params, distributions=space, value=value)
                    study.add_trial(told)
            params = study.ask(space).params
            yield tuple(f"{key}={params[key]}" for key in space)

    return suggest()


def _values(override: Override) -> list[str]:
    """The values of a list, choice(), glob() or range(), as on a command line."""
    values = list(dict.fromkeys(override.sweep_string_iterator()))
    if not values:
        raise UserError(f"{override.input_line} leaves no value for {override.get_key_element()}")
    return values


def _distribution(override: Override, of: Any) -> Any:
    """What Optuna draws from: numbers of an interval or of a range of integers, or else texts.

    An interval is of integers if both ends are, int(interval(1, 8)), and logarithmic by tag(log, ...).

    Args:
        of: optuna.distributions.
    """
    value = override.value()
    if isinstance(value, IntervalSweep):
        if others := value.tags - {"log"}:
            raise UserError(f"{override.input_line} is tagged {others.pop()}; the only tag is log")
        whole = all(isinstance(end, int) for end in (value.start, value.end))
        kind = of.IntDistribution if whole else of.FloatDistribution
        try:
            return kind(value.start, value.end, log="log" in value.tags)
        except ValueError as error:
            raise UserError(f"{override.input_line}: {first_line(error)}") from error
    texts = _values(override)
    if override.is_range_sweep() and all(text.lstrip("-").isdecimal() for text in texts):
        numbers = sorted(map(int, texts))
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        return of.IntDistribution(numbers[0], numbers[-1], step=step)
    return of.CategoricalDistribution(texts)


def _param(text: str, distribution: Any) -> Any:
    """A value of the command line as Optuna's; None if it is not one of the distribution's."""
    if hasattr(distribution, "choices"):
        return text if text in distribution.choices else None
    low, high, step = distribution.low, distribution.high, distribution.step
    try:
        value = type(low)(text)
    except ValueError:
        return None
    return value if low <= value <= high and not (step and (value - low) % step) else None
