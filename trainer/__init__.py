"""Ringmaster: a distributed training harness for PyTorch that you can read in one sitting."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def train(overrides: Sequence[str] = (), processes: int | None = None) -> dict[str, Any]:
    """Train as the command line would, from a program or a notebook; return what result.json holds.

    Args:
        overrides: as on the command line, `["strategy=ddp", "optim.lr=0.01"]`.
        processes: how many to start on this host; None or 1 trains in this one, unless `overrides` name a
            launcher.

    Raises:
        UserError: a mistake in the settings.
        NonFiniteLossError: a loss that was NaN or Inf.
        StoppedBySignal: Ctrl-C or a signal; the run is saved, and resume=auto goes on.
        RuntimeError: a fault in the processes that were started.
    """
    from trainer.api import train  # torch and Hydra are loaded only when asked for

    return train(overrides, processes)


def load_model(run_dir: str | Path, checkpoint: str | Path = "newest") -> "nn.Module":
    """Return the model of a run with the weights of a checkpoint, on the CPU and in evaluation mode.

    Where the run evaluates moving averages in their stead (`ema.evaluate=instead`), with those.

    Args:
        run_dir: what `run_dir` was, or the run chose; it is built from the config.yaml there.
        checkpoint: newest (that verifies), best (by the run's `checkpoint.keep_best`), or the path of one.

    Raises:
        UserError: no run, no such checkpoint, a broken one, or one that does not fit the model's class.
    """
    from trainer.api import load_model

    return load_model(run_dir, checkpoint)
