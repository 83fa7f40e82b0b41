"""Hydra's own settings: the values of `${hydra:...}`, and errors for settings that have no effect."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write

from trainer.errors import UserError

# Name -> (the value in conf/train.yaml, the alternative to setting another value).
_FIXED = {
    "run.dir": (".", "run_dir=... sets the directory of a run"),
    "sweep.subdir": (
        ".",
        "folders of trials are named after the swept settings; hydra.sweep.dir=... contains them",
    ),
    "output_subdir": (None, "config.yaml in run_dir contains all settings"),
    "job.chdir": (False, "a run stays in the current directory and writes its files to run_dir"),
}
_OUTPUT = "hydra:runtime.output_dir"


def apply_hydra_settings(settings: DictConfig, shown: DictConfig) -> None:
    """Make `${hydra:...}` resolve to values of `shown.hydra`, and set the variables in its job.env_set.

    Hydra does this only while it calls the decorated function. `${hydra:runtime.output_dir}` is run_dir.
    """
    for name, (fixed, way_out) in _FIXED.items():
        if (value := OmegaConf.select(shown.hydra, name)) != fixed:
            raise UserError(f"hydra.{name} is {value}, which has no effect; remove it: {way_out}")
    os.environ.update({name: str(value) for name, value in shown.hydra.job.env_set.items()})
    HydraConfig.instance().cfg = shown  # type: ignore[assignment]
    with read_write(shown.hydra), open_dict(shown.hydra):
        shown.hydra.runtime.output_dir = MISSING  # so that run_dir=${hydra:runtime.output_dir} is an error
        if settings.run_dir is not None:
            shown.hydra.runtime.output_dir = str(Path(settings.run_dir).absolute())
        elif _OUTPUT in OmegaConf.to_yaml(settings):
            raise UserError(
                f"${{{_OUTPUT}}} refers to run_dir, which is null and is chosen later; set run_dir=..."
            )


def separate_hydra_settings(composed: DictConfig) -> DictConfig:
    """Remove Hydra's settings from the composed config, and apply them with `apply_hydra_settings`."""
    HydraConfig.instance().set_config(composed)
    shown = HydraConfig.instance().cfg
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    apply_hydra_settings(composed, shown)  # type: ignore[arg-type]
    return composed
