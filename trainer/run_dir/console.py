"""The output of a run: lines that scroll above a progress bar, and train.log."""

import contextlib
import logging
import logging.handlers
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from trainer.distributed.ranks import Ranks
from trainer.errors import RunEndError, StoppedBySignal, UserError, writing

log = logging.getLogger("trainer")

_LINE_EVERY_S = 10.0


class ProgressBar:
    """The progress bar at the bottom of a terminal (steps, rate, time left), and lines that scroll above it.

    Without a terminal, lines contain the time left, and step lines are printed at most every ten seconds;
    train.log contains all of them. Rate and time left are based on the mean since this process started,
    including evaluations and saves.
    """

    def __init__(self, total_steps: int, steps_before: int, is_main: bool) -> None:
        self._total, self._first, self._step = total_steps, steps_before, steps_before
        self._began = time.perf_counter()
        self._next_line = self._began
        self._bar = tqdm(
            total=total_steps,
            initial=steps_before,
            unit="step",
            smoothing=0,
            bar_format="{n_fmt}/{total_fmt} steps |{bar}| {rate_fmt}, {remaining} left",
            dynamic_ncols=True,
            disable=not (is_main and sys.stdout.isatty()),
            file=sys.stdout,
        )

    def advance(self) -> None:
        self._step += 1
        self._bar.update()

    def step_line(self, text: str) -> None:
        """Print a line about a step; the first and the last line are always printed."""
        if not self._bar.disable:
            log.info("%s", text)
            return
        now, last = time.perf_counter(), self._step == self._total
        due = last or now >= self._next_line
        if due:
            self._next_line = now + _LINE_EVERY_S
        log.log(logging.INFO if due else logging.DEBUG, "%s%s", text, "" if last else self._time_left(now))

    def line(self, text: str) -> None:
        """Print a line about an event other than a step, such as an evaluation."""
        left = self._bar.disable and self._step < self._total
        log.info("%s%s", text, self._time_left(time.perf_counter()) if left else "")

    def close(self) -> None:
        """End the bar, and move the cursor to a new line."""
        self._bar.close()

    def _time_left(self, now: float) -> str:
        done = self._step - self._first
        if done < 2:  # the first step takes longer, because it compiles and opens connections
            return ""
        left_s = (now - self._began) / done * (self._total - self._step)
        return f"  {tqdm.format_interval(round(left_s))} left"


def table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class _Console(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # The reader of the output may be dead, and a notebook's stream may not support a character.
        with contextlib.suppress(OSError, UnicodeError):
            tqdm.write(self.format(record), file=self.stream)


@contextmanager
def terminal(ranks: Ranks, stream: TextIO) -> Iterator[None]:
    """Print log messages to `stream`; on ranks other than 0, print only warnings, prefixed with the rank."""
    console = _Console(stream)
    console.setLevel(logging.INFO if ranks.is_main else logging.WARNING)
    if not ranks.is_main:
        console.setFormatter(logging.Formatter(f"[rank {ranks.rank}] %(message)s"))
    log.setLevel(logging.DEBUG)
    log.propagate, before = False, log.handlers
    log.handlers = [console]
    try:
        yield
    finally:
        for handler in log.handlers:
            with contextlib.suppress(OSError):  # the disk of train.log may be full
                handler.close()
        log.handlers = before


@contextmanager
def messages(ranks: Ranks, run_dir: Path) -> Iterator[Callable[[], None]]:
    """Send log messages to the terminal and, on rank 0, to run_dir/train.log.

    Yields:
        A function that opens train.log and writes the previous messages to it, once. An exception other than
        RunEndError also opens it.
    """
    buffer = logging.handlers.MemoryHandler(sys.maxsize, sys.maxsize, flushOnClose=False)

    def open_file() -> None:
        if buffer not in log.handlers:
            return
        with writing(run_dir):
            to_file = logging.FileHandler(run_dir / "train.log", encoding="utf-8", errors="backslashreplace")
        # On a full disk, logging would print a traceback for each line; the error of metrics.jsonl is enough.
        to_file.handleError = lambda record: None  # type: ignore[method-assign]
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.handlers = [*(handler for handler in log.handlers if handler is not buffer), to_file]
        buffer.setTarget(to_file)
        buffer.flush()

    with terminal(ranks, sys.stdout if ranks.is_main else sys.stderr):
        if ranks.is_main:
            log.addHandler(buffer)
        try:
            yield open_file
        except StoppedBySignal as stopped:
            log.debug("%s", stopped)
            raise
        except Exception as error:
            log.debug("the run failed", exc_info=True)
            if not isinstance(error, RunEndError):
                with contextlib.suppress(UserError):
                    open_file()
            raise
