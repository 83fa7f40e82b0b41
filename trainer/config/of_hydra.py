"""Hydra's own settings: what `${hydra:...}` shows, and which of them have no effect on a run."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write

from trainer.errors import UserError

# Those of conf/train.yaml, and what does instead what another value asks for.
_FIXED = {
    "run.dir": (".", "run_dir=... is where a run writes its files"),
    "sweep.subdir": (".", "trials are named after what is swept; hydra.sweep.dir=... is their folder"),
    "output_subdir": (None, "config.yaml in run_dir has all settings"),
    "job.chdir": (False, "a run stays in the current directory, and writes its files to run_dir"),
}
_OUTPUT = "hydra:runtime.output_dir"


def take_hydra(settings: DictConfig, shown: DictConfig) -> None:
    """Let `${hydra:...}` show what is under `shown.hydra` from now on, and set its job.env_set.

    Hydra itself does so only while it calls a function. `${hydra:runtime.output_dir}` is run_dir.

    Args:
        settings: those of the run, which are not resolved yet.

    Raises:
        UserError: a setting of Hydra's has no effect; or run_dir is asked for, and not known yet.
    """
    for name, (fixed, way_out) in _FIXED.items():
        if (value := OmegaConf.select(shown.hydra, name)) != fixed:
            raise UserError(f"hydra.{name} is {value}, which has no effect; leave it out: {way_out}")
    os.environ.update({name: str(value) for name, value in shown.hydra.job.env_set.items()})
    HydraConfig.instance().cfg = shown  # type: ignore[assignment]
    with read_write(shown.hydra), open_dict(shown.hydra):
        shown.hydra.runtime.output_dir = MISSING  # perhaps run_dir is to be itself
        if settings.run_dir is not None:
            shown.hydra.runtime.output_dir = str(Path(settings.run_dir).absolute())
        elif _OUTPUT in OmegaConf.to_yaml(settings):
            raise UserError(f"${{{_OUTPUT}}} is run_dir, which is null and chosen later; set run_dir=...")


def split_off_hydra(composed: DictConfig) -> DictConfig:
    """Take Hydra's part out of all that was composed, and do with it as `take_hydra` says."""
    HydraConfig.instance().set_config(composed)
    shown = HydraConfig.instance().cfg
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    take_hydra(composed, shown)  # type: ignore[arg-type]
    return composed
