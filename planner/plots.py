"""Plots of predictions over world size, as .png, .svg or .pdf."""

import itertools
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.cost_model import Prediction
from planner.step import PredictedStep
from planner.world import PlannedWorld
from trainer.comm.algorithms.all_reduce import ALGORITHMS

_EXTENSIONS = (".png", ".svg", ".pdf")
_MARKERS = dict(zip(ALGORITHMS, itertools.cycle("os^Dv"), strict=False))


def file(name: str) -> Path:
    """Return the path `name` of a plot file, after checking it.

    Raises:
        ArgumentTypeError: the path is a folder, its parent does not exist, or the extension is not supported.
    """
    path = Path(name)
    if path.suffix not in _EXTENSIONS:
        raise ArgumentTypeError(f"{name}: expected a file with extension {', '.join(_EXTENSIONS)}")
    if path.is_dir():
        raise ArgumentTypeError(f"{name} is a folder, but must be a file")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{name}: the folder {path.parent} does not exist")
    return path


def worlds(world: PlannedWorld) -> list[PlannedWorld]:
    """Return worlds of 1, 2, 4, 8, ... hosts, up to the number of hosts of `world`."""
    numbers = {1 << i for i in range(world.num_hosts.bit_length())} | {world.num_hosts}
    return [world.with_hosts(number) for number in sorted(numbers)[:-1]] + [world]


def times(curves: Mapping[int, Mapping[str, Prediction]], what: str, per_host: int, file: Path) -> None:
    """Plot seconds by world size and algorithm, with logarithmic axes."""
    with _axes(f"{what}, {per_host} processes on each host", "predicted time (s)", file) as axes:
        axes.set_yscale("log")
        for algorithm in ALGORITHMS:
            points = [(size, by_name[algorithm].seconds) for size, by_name in curves.items()]
            points = [(size, value) for size, value in points if value > 0]
            axes.plot(*zip(*points, strict=True), marker=_MARKERS[algorithm], label=algorithm)


def efficiencies(curves: Mapping[int, Mapping[str, PredictedStep]], what: str, file: Path) -> None:
    """Plot the fraction of a step that is spent computing, by world size and algorithm."""
    with _axes(what, "computing / step (%)", file) as axes:
        axes.set_ylim(0, 103)
        for algorithm in sorted(curves[max(curves)], key=list(_MARKERS).index):
            values = [100 * f[algorithm].computed_s / f[algorithm].seconds for f in curves.values()]
            axes.plot(list(curves), values, marker=_MARKERS[algorithm], label=algorithm)


@contextmanager
def _axes(title: str, ylabel: str, file: Path) -> Iterator[Any]:
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="world size (processes)", ylabel=ylabel, title=title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    yield axes
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:  # for example, the disk is full
        raise ArgumentTypeError(f"--plot {file}: {error}") from error
