"""hydra.sweeper: the schema of its settings; the defaults are in conf/hydra/sweeper/."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trainer.config import at_least, check_limits, like, one_of
from trainer.config.overrides import not_a_setting
from trainer.errors import UserError, first_line


@dataclass
class SweepConfig:
    search: str = one_of("grid", "random", "tpe")
    trials: int | None = at_least(1)
    metric: str = MISSING
    mode: str = one_of("min", "max")
    concurrent: str = like(r"auto|0*[1-9][0-9]*", "auto or a number of trials")
    seeds: int = at_least(1)

    @property
    def sign(self) -> float:
        """The factor that makes a better metric smaller."""
        return 1.0 if self.mode == "min" else -1.0


def load(settings: Mapping[str, Any]) -> SweepConfig:
    """Return the typed and validated settings.

    Raises:
        UserError: an unknown key, a wrong type, or a value outside its limits.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepConfig), dict(settings)))
    except ConfigKeyError as error:
        raise UserError(not_a_setting(f"hydra.sweeper.{error.key}")) from error
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.sweeper.{error.full_key}: {first_line(error)}") from error
    assert isinstance(config, SweepConfig)
    check_limits(config, "hydra.sweeper.")
    return config
