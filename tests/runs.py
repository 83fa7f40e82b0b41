"""Whole runs of the trainer inside a test: composed as train.py composes them, in ranks of tests.ranks."""

from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from trainer import config


CONF = Path(__file__).parents[1] / "conf"


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def settings(*overrides: str) -> config.Config:
    return config.load(composed(*overrides))


def train(*overrides: str) -> dict[str, Any]:
    """Run in this process, which may be a rank; return what result.json holds."""
    from trainer.run import run  # only here: composing settings needs none of it

    torch.set_num_threads(1)
    return run(settings(*overrides))
