"""A sweep from its command line to its end: common and swept settings, folder, and search."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from trainer import config
from trainer.config.overrides import EACH_TRIAL_LAUNCHES
from trainer.errors import UserError
from trainer.launch.exits import refuse_sweep_in_ranks
from trainer.sweep import settings
from trainer.sweep.folder import sweep_folder
from trainer.sweep.runner import Runner
from trainer.sweep.search import GridSearch, OptunaSearch, Search
from trainer.sweep.space import split


def sweep(
    composed: DictConfig, loader: ConfigLoader, sweeper: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Run the sweep of the overrides `arguments`.

    Args:
        composed: the settings without the swept ones, with Hydra's own.
        sweeper: hydra.sweeper.

    Raises:
        UserError: the command line is wrong, or a setting ended a trial.
        SystemExit: with the status of the sweep.
    """
    refuse_sweep_in_ranks()
    launcher = composed.hydra.runtime.choices["hydra/launcher"]
    if launcher != "basic":
        raise UserError(f"hydra/launcher={launcher}: {EACH_TRIAL_LAUNCHES}")
    wanted = settings.load(sweeper)
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(arguments))
    _refuse(overrides, wanted)
    common, swept = split(overrides)
    grid = GridSearch(swept, wanted.trials) if wanted.search == "grid" else None

    def compose(overrides: Sequence[str]) -> config.Config:
        trial = loader.load_sweep_config(composed, list(overrides))
        with open_dict(trial):
            del trial["hydra"]
        loaded = config.load(trial)
        if not loaded.launch.leaves_result:
            raise UserError(
                "a sweep waits for each trial: launch.dry_run=true and launch.wait=false are for single "
                "runs, without -m"
            )
        return loaded

    with sweep_folder(composed.hydra.sweep) as folder:
        search: Search = grid or OptunaSearch(wanted, swept, folder, composed.seed)
        sys.exit(Runner(wanted, search, folder, common, _options(composed, arguments), compose).run())


def _options(composed: DictConfig, arguments: Sequence[str]) -> list[str]:
    """Other options of the command line, such as --config-dir, for each trial."""
    of_hydra = list(composed.hydra.overrides.hydra)
    options = [word for word in sys.argv[1:] if word not in (*arguments, *of_hydra, "-m", "--multirun")]
    return options + [word for word in of_hydra if word.startswith("hydra.searchpath=")]


def _refuse(overrides: Sequence[Override], wanted: settings.SweepConfig) -> None:
    """Refuse settings of a single run that the sweep sets for its trials."""
    for override in overrides:
        line, key = override.input_line, override.key_or_group
        if key == "run_dir":
            raise UserError(
                f"{line} would be the directory of every trial; hydra.sweep.dir contains one for each"
            )
        if key == "seed" and wanted.seeds > 1 and override.is_sweep_override():
            raise UserError(f"{line} and hydra.sweeper.seeds={wanted.seeds} both choose seeds; leave one out")
