"""TensorBoard's HParams tab for a sweep: its protos beside the events of each trial.

They are in the trial's own folder: SummaryWriter.add_hparams creates another run for each. A column holds
numbers, truth values, or strings: a None among numbers would hide its trial, so such a column is all strings.
"""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as api
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.sweep.trial_log import Trial
from trainer.sweep.values import swept_keys, typed

_SUFFIX = ".hparams"


def write(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """Write the settings of every trial that has started, and replace those of an earlier report."""
    keys = swept_keys(trials)
    columns = {key: one_type([typed(trial.swept.get(key, "null")) for trial in trials]) for key in keys}
    seeds = one_type([trial.seed for trial in trials])
    # Under a separate tag: a run may end before its first log step, and not all its metrics are scalars.
    tag = f"sweep/{metric}"
    described = api.hparams_config_pb(
        hparams=[api.HParam(key) for key in (*keys, *(["seed"] if "seed" not in keys else []))],
        metrics=[api.Metric(tag, display_name=metric)],
    )
    for index, trial in enumerate(trials):
        events = folder / trial.folder / "tensorboard"
        if not events.is_dir():
            continue
        for old in events.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # the tab then also shows an old metric
                old.unlink()
        values = {key: columns[key][index] for key in keys}
        values.setdefault("seed", seeds[index])
        writer = EventFileWriter(str(events), filename_suffix=_SUFFIX)
        for summary in (described, api.hparams_pb(values, trial_id=trial.folder)):
            writer.add_event(Event(summary=summary))
        if trial.value is not None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=trial.value)])
            writer.add_event(Event(summary=summary))
        writer.close()


def one_type(column: Sequence[Any]) -> list[bool | float | str]:
    """The values of one setting over the trials: all truth values, all numbers, or all strings."""
    if all(isinstance(value, bool) for value in column):
        return list(column)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column) and all(
        math.isfinite(value) for value in column
    ):
        return [float(value) for value in column]
    return ["null" if value is None else str(value) for value in column]
