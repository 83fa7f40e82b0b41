"""results.png: the metric over each swept setting, and all settings at once as parallel coordinates."""

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.sweep import trial_log
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trial_log import Trial
from trainer.sweep.values import swept_keys, typed

_MOST_COLUMNS = 4


def draw(
    path: Path, trials: Sequence[Trial], settings: SweepConfig, by_log: Container[str] = frozenset()
) -> bool:
    """Draw the trials that are done; False if there are less than two, or nothing was swept.

    `by_log` are the settings that were searched on a log scale.
    """
    done = [trial for trial in trials if trial.state == trial_log.DONE and trial.value is not None]
    keys = [key for key in swept_keys(done) if len({trial.swept.get(key) for trial in done}) > 1]
    if len(done) < 2 or not keys:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_columns = min(len(keys), _MOST_COLUMNS)
    num_rows = -(-len(keys) // num_columns)
    figure = plt.figure(figsize=(max(6, 3.6 * num_columns), 3 * num_rows + 3.4), layout="constrained")
    grid = figure.add_gridspec(num_rows + 1, num_columns)
    values = [trial.value for trial in done if trial.value is not None]
    by_key = {key: Axis([trial.swept.get(key, "null") for trial in done], key in by_log) for key in keys}
    for index, (key, axis) in enumerate(by_key.items()):
        axes = figure.add_subplot(grid[divmod(index, num_columns)])
        axes.scatter(axis.places, values, c=values, cmap=_colours(settings), s=24)
        if axis.words:
            axes.set_xticks(range(len(axis.words)), axis.words, rotation=20 if len(axis.words) > 3 else 0)
        elif axis.log:
            axes.set_xscale("log")
            if max(axis.places) / min(axis.places) >= 30:  # labels between powers of ten would overlap
                axes.tick_params(axis="x", which="minor", labelbottom=False)
        axes.set_xlabel(key)
        axes.set_ylabel(settings.metric)
        axes.grid(alpha=0.3)
    _parallel(figure.add_subplot(grid[num_rows, :]), by_key, values, settings)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


class Axis:
    """Positions of a setting's values: strings, or numbers on a linear scale.

    On a log scale if they were searched on one, or span one and a half decades.
    """

    def __init__(self, texts: Sequence[str], searched_by_log: bool = False) -> None:
        values = [typed(text) for text in texts]
        self.log = False
        self.words: list[str] = []
        self.places: list[float]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            self.places = [float(value) for value in values]
            low, high = min(self.places), max(self.places)
            self.log = low > 0 and (searched_by_log or high / low >= 30)
        else:
            self.words = sorted(set(texts))
            self.places = [float(self.words.index(text)) for text in texts]

    def unit(self) -> list[float]:
        """From 0 to 1."""
        places = [math.log(place) for place in self.places] if self.log else self.places
        low, width = min(places), max(places) - min(places)
        return [(place - low) / width if width else 0.5 for place in places]

    def ends(self) -> tuple[str, str]:
        if self.words:
            return self.words[0], self.words[-1]
        return f"{min(self.places):.3g}", f"{max(self.places):.3g}"


def _parallel(axes: Any, by_key: Mapping[str, Axis], values: Sequence[float], settings: SweepConfig) -> None:
    import matplotlib

    columns = [*by_key.values(), Axis([repr(value) for value in values])]
    colours = matplotlib.colormaps[_colours(settings)]
    goodness = columns[-1].unit()
    lines = list(zip(*(column.unit() for column in columns), strict=True))
    best_last = sorted(range(len(lines)), key=lambda one: settings.sign * values[one], reverse=True)
    for index in best_last:
        axes.plot(lines[index], color=colours(goodness[index]), alpha=0.8, linewidth=1.2)
    axes.plot(lines[best_last[-1]], color="black", linewidth=2, label="best")
    for place, column in enumerate(columns):
        axes.axvline(place, color="grey", linewidth=0.8)
        marks = (
            [(n / max(1, len(column.words) - 1), word) for n, word in enumerate(column.words)]
            if 1 < len(column.words) <= 8
            else list(zip((0.0, 1.0), column.ends(), strict=True))
        )
        for height, text in marks:
            axes.annotate(text, (place, height), xytext=(4, 2), textcoords="offset points", fontsize="small")
    axes.set_xticks(range(len(columns)), [*by_key, settings.metric])
    axes.set_yticks([])
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")


def _colours(settings: SweepConfig) -> str:
    """Dark is good."""
    return "viridis" if settings.mode == "min" else "viridis_r"
