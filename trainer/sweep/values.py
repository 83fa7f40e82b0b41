"""The values of swept settings, as reports read them from the trial log."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from trainer.sweep.trial_log import Trial


def swept_keys(trials: Sequence[Trial]) -> list[str]:
    """The settings that were swept, in the order of the command line."""
    return list(dict.fromkeys(key for trial in trials for key in trial.swept))


def typed(text: str) -> Any:
    """A value as Hydra would read it from the command line: a number, a bool, None, a list, a string."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
