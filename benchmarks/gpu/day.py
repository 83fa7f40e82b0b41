"""Shared code of the GPU benchmarks: sizes, runs, timing in rotation, table rows."""

import io
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """A measured value; `bar` is its limit. `ok` is None if there is no limit on this machine."""

    what: str
    value: float | None
    unit: str = ""
    bar: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Day:
    """Options of the GPU benchmarks; `dry` runs the same code with tiny sizes on a CPU."""

    dry: bool
    out: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, real: _T, tiny: _T) -> _T:
        return tiny if self.dry else real

    def finish(self) -> None:
        """Wait for the queued work of the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def rated(self, what: str, value: float, unit: str, least: float, note: str = "") -> Row:
        """Return a row whose value must be at least `least` on a GPU."""
        return Row(what, value, unit, f">= {least:g}", value >= least if self.on_gpu else None, note)


def settings(*overrides: str) -> Any:
    from hydra import compose, initialize_config_dir

    from trainer.config import load
    from trainer.config.overrides import CONF

    quiet = ("logger=jsonl", "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "strategy=single")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load(compose("train", overrides=[*quiet, *overrides]))


@contextmanager
def contexts() -> Iterator[Callable[..., Any]]:
    """Yield a function from overrides to a run that is ready to train; all runs share a process group."""
    from trainer.assemble import assemble
    from trainer.distributed.process_group import process_group
    from trainer.launch.signals import StopRequest

    with ExitStack() as stack:
        stop_request = stack.enter_context(StopRequest())
        ranks = stack.enter_context(process_group(settings().distributed))

        def context(*overrides: str) -> Any:
            config = settings(*overrides)
            if config.run_dir is None:
                run_dir = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                config = replace(config, run_dir=run_dir)
            Path(config.run_dir).mkdir(parents=True, exist_ok=True)
            made = assemble(config, "gpu-day", ranks, stop_request)
            made.report.run_log.open()
            stack.callback(made.report.run_log.close)
            return made

        yield context


def steps(context: Any) -> Iterator[None]:
    """Run Ringmaster's training loop, and yield after each step."""
    from tests.runs import steps_of

    return steps_of(context)


def in_turns(day: Day, ways: dict[str, Iterator[None]], turns: int, each: int) -> dict[str, list[float]]:
    """Return ms per step, with the GPU's time, of each variant and round; the order of variants rotates."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(each):  # warm-up: compilation, autotuning, memory allocation
            next(way)
    names = list(ways)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            day.finish()
            begin = time.perf_counter()
            for _ in range(each):
                next(ways[name])
            day.finish()
            found[name].append(1e3 * (time.perf_counter() - begin) / each)
    return found


def ratio(ringmaster: list[float], other: list[float]) -> float:
    """Return the speed of Ringmaster relative to the other variant: the median over rounds."""
    return statistics.median(b / a for a, b in zip(ringmaster, other, strict=True))


def quietly(action: Callable[[], _T]) -> _T:
    """Call a function without its output; if it raises, add the end of the output to the exception."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            return action()
    except Exception as error:
        error.add_note(output.getvalue()[-1500:])
        raise


def machine(day: Day) -> dict[str, Any]:
    """Return the GPU, its driver, and the versions on which results depend."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "device": str(day.device)}
    if day.on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": str(torch.cuda.device_count())}
        found |= {"driver": answer.stdout.split("\n")[0], "cuda": str(torch.version.cuda), "nccl": nccl}
    return found | {"dry": day.dry}


def table(rows: list[Row]) -> str:
    marks = {None: "", True: "ok", False: "MISSED"}
    values = ["" if row.value is None else f"{row.value:.4g}" for row in rows]
    cells = [
        (row.what, value, row.unit, row.bar, marks[row.ok], row.note)
        for row, value in zip(rows, values, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)
