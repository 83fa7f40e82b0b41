"""Report the progress of a run from rank 0 to the loggers, metrics.jsonl and the terminal."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.config import Config, flatten
from trainer.config.instantiate import instantiate
from trainer.distributed.agreement import on_main
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, kind_of, writing
from trainer.loggers.base import METHODS, Logger
from trainer.run_dir.claim import write_facts
from trainer.run_dir.console import ProgressBar
from trainer.run_dir.metrics_file import FILE as METRICS
from trainer.run_dir.metrics_file import MetricsFile
from trainer.run_dir.steps_file import StepRecord, StepsFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pace:
    """Limits work in `with pace:` to 1% of the time, if it is done only when `is_due` returns true.

    The work is due for the first time after `first_after_s` seconds, or at every `every`-th call of `is_due`.
    """

    def __init__(self, first_after_s: float = 0, every: int | None = None) -> None:
        self._due, self._every, self._asked = time.perf_counter() + first_after_s, every, 0

    def is_due(self) -> bool:
        self._asked += 1
        if self._every is not None:
            return self._asked % self._every == 0
        return time.perf_counter() >= self._due

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        self._due = ended + 99 * (ended - self._began)


class RunLog:
    """Writes to metrics.jsonl and all loggers on rank 0; on other ranks its methods do nothing."""

    def __init__(
        self, ranks: Ranks, config: Config, run_id: str, total_steps: int, steps_before: int
    ) -> None:
        assert config.run_dir is not None
        run_dir = Path(config.run_dir)
        self._ranks, self.enabled = ranks, ranks.is_main
        self.shows = Pace(first_after_s=10, every=config.train.show_every)
        self._plotting = Pace(first_after_s=60)  # the first plot imports matplotlib: 0.6 s, 1 % of a minute
        self._run_dir, self._total_steps, self._steps_before = run_dir, total_steps, steps_before
        self._loggers: dict[str, Logger] = {}  # by their settings
        self._run_id, self._best = run_id, config.checkpoint.best
        settings = MappingProxyType(flatten(config))  # Hydra would build a `_target_` in a dict
        facts = {"run_dir": run_dir, "run_id": run_id, "first_step": steps_before, "settings": settings}

        def build() -> None:
            with writing(run_dir):
                for name, node in config.logger.items():
                    self._loggers[f"logger.{name}"] = _logger(f"logger.{name}", node, facts)

        on_main(build, ranks)

    def open(self) -> None:
        """Open metrics.jsonl and run.json, once the run is certain to start (a collective)."""

        def start() -> None:
            facts = {"first_step": self._steps_before, "total_steps": self._total_steps}
            with writing(self._run_dir):
                self._scalars = MetricsFile(self._run_dir, self._steps_before)
                self._steps = StepsFile(self._run_dir, self._steps_before)
                write_facts(self._run_dir, self._run_id, **facts, best=asdict(self._best))

        on_main(start, self._ranks)
        self.progress = ProgressBar(self._total_steps, self._steps_before, self.enabled)

    @property
    def look(self) -> str:
        """Commands or URLs for viewing the run."""
        ways = [getattr(logger, "look", "") for logger in self._loggers.values()]
        return "  ".join(filter(None, ways)) or str(self._run_dir / METRICS)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write `values` to metrics.jsonl and to the loggers at optimizer step `step`."""
        if not self.enabled:
            return
        with writing(self._run_dir):
            self._scalars.write(values, step)
        self._call("scalars", values, step)

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Write the numbers of consecutive steps to steps.bin."""
        if self.enabled:
            with writing(self._run_dir):
                self._steps.write(records)

    def weights_hash(self, value: int, step: int) -> None:
        """Write the hash of the weights after `step` to metrics.jsonl, but not to loggers."""
        if self.enabled:
            with writing(self._run_dir):
                self._scalars.write({"weights_hash": value}, step)

    def texts(self, texts: Mapping[str, str], step: int) -> None:
        """Write Markdown by name; characters that UTF-8 cannot encode are escaped."""
        for name, text in texts.items():
            self._call("text", name, text.encode(errors="backslashreplace").decode(), step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Write images (3 or 1, H, W) by name, uint8 or floats in [0, 1]."""
        for name, image in images.items():
            self._call("image", name, image.cpu(), step)

    def histograms(self, histograms: Mapping[str, tuple[Tensor, Tensor]], step: int) -> None:
        """Write histograms by name: counts (n,) between edges (n + 1,), float64."""
        for name, (counts, edges) in histograms.items():
            self._call("histogram", name, counts, edges, step)

    def plots(self, draw: Callable[[], Mapping[str, "Figure"]], step: int, at_end: bool = False) -> None:
        """Draw plots at the end of a run, and before the end for at most 1% of the time."""
        if self._loggers and (at_end or self._plotting.is_due()):
            with self._plotting:
                for name, figure in draw().items():
                    self._call("figure", name, figure, step)

    def close(self) -> None:
        self.progress.close()
        with ExitStack() as closing:
            for setting in self._loggers:
                closing.callback(self._call_one, setting, "close")
            if self.enabled:
                closing.enter_context(writing(self._run_dir))
                closing.callback(self._scalars.close)
                closing.callback(self._steps.close)

    def _call(self, method: str, *arguments: Any) -> None:
        for setting in self._loggers:
            self._call_one(setting, method, *arguments)

    def _call_one(self, setting: str, method: str, *arguments: Any) -> None:
        try:
            getattr(self._loggers[setting], method)(*arguments)
        except OSError as error:  # from the disk, or from a server
            message = f"{setting} of run_dir={self._run_dir} cannot be written: {error}"
            raise kind_of(error)(message) from error


def _logger(name: str, node: dict[str, Any], facts: dict[str, Any]) -> Logger:
    logger: Logger = instantiate(name, node, **facts)
    if lacking := [method for method in METHODS if not callable(getattr(logger, method, None))]:
        raise UserError(
            f"{name}: {node['_target_']} creates a {type(logger).__name__} that lacks the methods "
            f"{', '.join(lacking)} of trainer.loggers.Logger"
        )
    return logger
