"""Start a sweep from its command line: find the swept settings, check their values, and run the trials."""

import fcntl
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from trainer import config
from trainer.config.hydra_settings import separate_hydra_settings
from trainer.config.nodes import typed
from trainer.config.overrides import EACH_TRIAL_LAUNCHES, missing_key
from trainer.errors import UserError
from trainer.launch.exits import refuse_sweep_in_ranks
from trainer.sweep.pruning import Pruning
from trainer.sweep.runner import Runner
from trainer.sweep.search import SweepConfig, grid, suggestions, with_settings
from trainer.sweep.trials import Combination, TrialLog, words_of


def sweep(
    composed: DictConfig, loader: ConfigLoader, sweeper: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Run the sweep that the overrides `arguments` describe, and exit with its status."""
    refuse_sweep_in_ranks()
    launcher = composed.hydra.runtime.choices["hydra/launcher"]
    if launcher != "basic":
        raise UserError(f"hydra/launcher={launcher}: {EACH_TRIAL_LAUNCHES}")
    wanted: SweepConfig = typed(SweepConfig, "hydra.sweeper", sweeper)
    params = [f"{key}={value}" for key, value in (wanted.params or {}).items()]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*params, *arguments])
    # The last override of a key takes precedence.
    overrides = list({override.get_key_element(): override for override in parsed}.values())
    for override in overrides:
        line, key = override.input_line, override.key_or_group
        if key == "run_dir":
            raise UserError(
                f"{line} would be the directory of every trial; set hydra.sweep.dir, the folder of all trials"
            )
        if key == "seed" and wanted.seeds > 1 and override.is_sweep_override():
            raise UserError(f"{line} and hydra.sweeper.seeds={wanted.seeds} both choose seeds; remove one")
    swept = [override for override in overrides if override.is_sweep_override()]
    common = [str(override.input_line) for override in overrides if override not in swept]

    groups = [each for each in swept if loader.get_group_options(each.key_or_group)]

    @functools.cache
    def exists(key: str, value: str) -> bool:
        """Return whether the setting `key` exists for some choice of the swept configuration groups."""
        for choices in grid(groups):
            try:
                loader.load_sweep_config(composed, [*common, *words_of({**choices, key: value})])
                return True
            except ConfigCompositionException:
                continue
        return False

    def compose(combination: Combination) -> tuple[Combination, config.Config]:
        try:
            trial = loader.load_sweep_config(composed, [*common, *words_of(combination)])
        except ConfigCompositionException as error:
            key = missing_key(error) or ""
            if (value := combination.get(key)) is None or not exists(key, value):
                raise
            return compose({**combination, key: None})
        trial.run_dir = composed.hydra.sweep.dir  # for the checks; the folder of the trial isn't known yet
        loaded = config.load(separate_hydra_settings(trial))
        if not loaded.launch.returns_result:
            raise UserError(
                "launch.dry_run=true and launch.wait=false cannot be used with -m, because a sweep waits for "
                "each trial"
            )
        config.check_processes(loaded)
        return combination, loaded

    # Other options of the command line, such as --config-dir, apply to each trial.
    hydra_settings = list(composed.hydra.overrides.hydra)
    options = [word for word in sys.argv[1:] if word not in (*arguments, *hydra_settings, "-m", "--multirun")]
    options += [word for word in hydra_settings if word.startswith(("hydra.searchpath=", "hydra.job."))]
    # A file may set hydra.mode=MULTIRUN, which would make each trial a sweep.
    if not any(word.startswith("hydra.mode=") for word in hydra_settings):
        options.append("hydra.mode=RUN")
    planned = []
    if wanted.search == "grid":  # compose all combinations before the first trial, to find mistakes early
        planned = list(itertools.islice(with_settings(grid(swept), compose), wanted.trials))
        refused = [reason for _, reason in planned if isinstance(reason, str)]
        if len(refused) == len(planned):
            raise UserError(refused[-1])
    folder = Path(composed.hydra.sweep.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")  # until this process ends
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another sweep is running in hydra.sweep.dir={folder}; change it") from error
    except OSError as error:
        raise UserError(f"hydra.sweep.dir={folder} cannot be written: {error}") from error
    log = TrialLog(folder, common, wanted.metric)
    pruning = Pruning(wanted, log) if wanted.pruning else None
    suggested = with_settings(suggestions(wanted, swept, log, composed.seed), compose)
    search = iter(planned) if wanted.search == "grid" else suggested
    sys.exit(Runner(wanted, search, log, options, pruning).run())
