"""The sweeper for Hydra, which finds it by name, in a package that others share (no __init__.py)."""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LaunchSweeper(Sweeper):
    """Each trial of `-m` is its own launch: see trainer/sweep."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep of the overrides `arguments`, and end this process with its status."""
        from trainer.sweep.command import sweep  # Hydra reads this file in every run

        assert self.config is not None and self.hydra_context is not None
        sweep(self.config, self.hydra_context.config_loader, self._settings, arguments)
