"""What a person sees: lines and a progress bar on rank 0's terminal, train.log, TensorBoard."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from trainer.distributed import Dist

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("trainer")


class RunLog:
    """The voice of rank 0; on other ranks it says nothing.

    TensorBoard events are flushed at every log step: a killed run loses at most what came after the last.
    """

    def __init__(self, dist: Dist, run_dir: Path, total_steps: int, first_step: int) -> None:
        self.enabled = dist.is_main
        if not self.enabled:
            return
        # A resumed run writes its steps again; purge_step hides those of the run before.
        purge_step = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
        # On time.perf_counter. The first picture imports matplotlib: 0.6 s, 1 % of a minute.
        self._next_figures = time.perf_counter() + 60
        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stdout.isatty(),
            file=sys.stdout,
        )

    def text(self, name: str, text: str) -> None:
        if self.enabled:
            self._writer.add_text(name, text)

    def advance(self) -> None:
        if self.enabled:
            self._bar.update()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write `values` to TensorBoard at optimizer step `step`."""
        if self.enabled:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def figures(self, draw: Callable[[], Mapping[str, "Figure"]], step: int, at_end: bool = False) -> None:
        """Draw pictures for TensorBoard at the end of a run, and before that for at most 1 % of the time."""
        began = time.perf_counter()
        if self.enabled and (at_end or began >= self._next_figures):
            for name, figure in draw().items():
                self._writer.add_figure(name, figure, step)
            ended = time.perf_counter()
            self._next_figures = ended + 100 * (ended - began)

    def line(self, text: str) -> None:
        """Print a line on the progress of the run; a bar, where there is one, shows it instead."""
        if self.enabled:
            if self._bar.disable:
                log.info("%s", text)
            else:
                self._bar.set_postfix_str(text)
                log.debug("%s", text)

    def close(self) -> None:
        if self.enabled:
            self._bar.close()
            self._writer.close()


def table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class _Console(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=self.stream)  # above the bar, where there is one


@contextmanager
def messages(dist: Dist, run_dir: Path) -> Iterator[None]:
    """Send the trainer's messages to the terminal and, on rank 0, to run_dir/train.log.

    Other ranks speak only to warn, and say who they are.
    """
    log.setLevel(logging.DEBUG)
    log.propagate = False
    console = _Console(sys.stdout if dist.is_main else sys.stderr)
    console.setLevel(logging.INFO if dist.is_main else logging.WARNING)
    if not dist.is_main:
        console.setFormatter(logging.Formatter(f"[rank {dist.rank}] %(message)s"))
    handlers: list[logging.Handler] = [console]
    if dist.is_main:
        to_file = logging.FileHandler(run_dir / "train.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(to_file)
    log.handlers = handlers
    try:
        yield
    except Exception:
        log.debug("the run ends here", exc_info=True)
        raise
    finally:
        for handler in handlers:
            handler.close()
        log.handlers = []
