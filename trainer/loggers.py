"""What a person sees: lines and a progress bar on the terminal, train.log, TensorBoard, metrics.jsonl."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from trainer.distributed import Dist
from trainer.errors import writing
from trainer.scalars import ScalarFile

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
        # A resumed run writes its steps again, from the first one on if it died before it was saved;
        # purge_step hides those of the process before; metrics.jsonl is cut.
        purge_step = first_step + 1
        self._run_dir = run_dir
        with writing(run_dir):
            self._scalars = ScalarFile(run_dir, first_step)
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
            with writing(self._run_dir):
                self._writer.add_text(name, text)

    def advance(self) -> None:
        if self.enabled:
            self._bar.update()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write `values` to TensorBoard and metrics.jsonl at optimizer step `step`."""
        if self.enabled:
            with writing(self._run_dir):
                self._scalars.write(values, step)
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
                self._writer.flush()

    def figures(self, draw: Callable[[], Mapping[str, "Figure"]], step: int, at_end: bool = False) -> None:
        """Draw pictures for TensorBoard at the end of a run, and before that for at most 1 % of the time."""
        began = time.perf_counter()
        if self.enabled and (at_end or began >= self._next_figures):
            pictures = draw()
            with writing(self._run_dir):
                for name, figure in pictures.items():
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
            with writing(self._run_dir):
                self._writer.close()
                self._scalars.close()


def table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class _Console(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the launcher that read what we print may have died
            tqdm.write(self.format(record), file=self.stream)  # above the bar, where there is one


class _LogFile(logging.FileHandler):
    """Says once that the disk is full, where logging prints a traceback for every line; the run goes on."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            print(f"{self.baseFilename} cannot be written: {error}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


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
        with writing(run_dir):
            to_file = _LogFile(run_dir / "train.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(to_file)
    log.handlers = handlers
    say_thread_ended, threading.excepthook = threading.excepthook, _leave_to_the_main_thread
    try:
        yield
    except Exception:
        log.debug("the run ends here", exc_info=True)
        raise
    finally:
        threading.excepthook = say_thread_ended
        for handler in handlers:
            handler.close()
        log.handlers = []


def _leave_to_the_main_thread(ended: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer thread passes its error on to the next flush: one message is enough."""
    if not type(ended.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(ended)
