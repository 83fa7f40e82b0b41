"""Ringmaster: a distributed training harness for PyTorch whose core you can read in one sitting."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import RunEndError, without_internals

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.inference.trained import TrainedRun

if sys.platform != "linux":  # locks, shared memory, signals and network interfaces are asked of its kernel
    raise ImportError(f"Ringmaster runs on Linux only; this system is {sys.platform}")


def train(
    overrides: Sequence[str] = (),
    processes: int | None = None,
    config_dirs: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Train as the command line would, from a program or a notebook; return the contents of result.json.

    Args:
        overrides: as on the command line, `["strategy=ddp", "optim.lr=0.01"]`.
        processes: how many to start on this host; None or 1 trains in this one, unless `overrides` name a
            launcher. A thread other than the main one always starts its own, since Python handles signals in
            the main thread only: so runs can train beside each other.
        config_dirs: folders like conf/, with your own `data/mine.yaml` and so on. They add options; of two
            with one name that of conf/ is taken.

    Raises:
        UserError: the settings are wrong, or a file cannot be read or written; a ValueError.
        NonFiniteError: the loss or a gradient was NaN or Inf; an ArithmeticError.
        StoppedBySignal: Ctrl-C or a signal; the run is saved, and resume=auto continues it.
        RuntimeError: a fault in the started processes. A fault in this one is raised as it is.

    The first three are in `trainer.errors`; each says in one line what to do.
    """
    from trainer.api import train  # loads torch and Hydra only now

    try:
        return train(overrides, processes, config_dirs)
    except RunEndError as error:
        raise without_internals(error) from error.__cause__


def gather(z: "Tensor") -> "tuple[Tensor, int]":
    """Return the rows of `z` of all ranks, and the number of this rank's first row among them (a collective).

    For a loss that compares samples of the whole global batch, as SimCLR's and CLIP's do: `Task.loss`
    compares the rows of its rank with all, and returns their mean. Gradients go back to each rank's rows.
    In a single process, and outside a run, it returns `(z, 0)`.

    Args:
        z: (B, ...); ranks may have unequal B.

    Raises:
        UserError: a step has several micro-batches, train.exact is set, or this is an evaluation.
    """
    from trainer.distributed.gather_samples import gather

    return gather(z)


def open(run_dir: str | Path, checkpoint: str | Path = "newest") -> "TrainedRun":
    """Return a trained run: its `model`, and `predict(samples)`, without its training data.

    The arguments and errors are those of `load_model`.
    """
    from trainer.api import open_run

    try:
        return open_run(run_dir, checkpoint)
    except RunEndError as error:
        raise without_internals(error) from error.__cause__


def load_model(run_dir: str | Path, checkpoint: str | Path = "newest") -> "nn.Module":
    """Return the model of a run with the weights of a checkpoint, on the CPU and in evaluation mode.

    If the run evaluates moving averages instead (`ema.evaluate=instead`), with those.

    Args:
        run_dir: the directory of the run, or its address. The model is built as its config.yaml says, whose
            classes are called.
        checkpoint: newest (that verifies), best (by the run's `checkpoint.keep_best`), or the path of one.

    Raises:
        UserError: the run or the checkpoint does not exist, is broken, or does not fit the model's class.
    """
    from trainer.api import load_model

    try:
        return load_model(run_dir, checkpoint)
    except RunEndError as error:
        raise without_internals(error) from error.__cause__
