"""Finds a run's checkpoint and reads its model: for commands that run after training, or during it."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.fits import check_left_out, make_buffers, model_targets
from trainer.checkpoint.listing import Listing, best_of
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified_by_all
from trainer.checkpoint.tree import put_together
from trainer.config import KeepBest
from trainer.distributed.agreement import Agreement
from trainer.errors import UserError
from trainer.files.address import Location, location
from trainer.optim.plain_names import buffers_outside, load_model_state, model_state

log = logging.getLogger(__name__)

_AVERAGE = "ema.weights."


def read_model(
    model: nn.Module,
    run_dir: Location,
    run_id: str | None,
    which: str,
    best: KeepBest | None,
    agreement: Agreement,
    device: torch.device,
    begun: Mapping[str, str],
) -> OpenCheckpoint:
    """Load a checkpoint into `model`, sharded or not, and return it (a collective).

    Changes nothing in `run_dir`. A run may be writing there.

    Args:
        run_id: of the run that `newest` and `best` mean; None for any.
        device: where the model computes.
        which: newest (of those that verify), best (by the metric `best`), or a path.
        begun: `frozen_digests` of the model.

    Raises:
        UserError: on every rank alike: there is none, it is damaged, or it is of another model.
    """

    found = agreement.on_main(lambda: _candidates(run_dir, run_id, which, best))
    source = first_intact(found, agreement) if which == "newest" else verified_by_all(found[0], agreement)

    def load() -> None:
        check_left_out(source, begun)
        load_model(model, source, device)

    agreement.everywhere(load)
    return source


def _candidates(run_dir: Location, run_id: str | None, which: str, best: KeepBest | None) -> list[Location]:
    """The checkpoints that `which` may mean, to be tried in order. UserError if there is none."""
    listing: Listing[Any] = Listing(run_dir / "checkpoints", run_id)
    if which == "best":
        if best is None:
            raise UserError(
                f"{run_dir} was not told what is best: its checkpoint.keep_best is null; add for instance "
                "'checkpoint.keep_best={metric: eval/loss, mode: min}'"
            )
        if not (chosen := best_of(listing.own(), best.metric, best.mode)):
            raise UserError(f"{run_dir} has no checkpoint with a finite {best.metric}")
        return chosen
    if which == "newest":
        found: list[Location] = listing.newest_first()
        if not found:
            raise UserError(f"{run_dir} has no checkpoint: {run_dir / 'checkpoints'} holds none of this run")
        return found
    named = [path for path in (location(which), run_dir / "checkpoints" / which) if path.is_dir()]
    if not named:
        raise UserError(f"the checkpoint {which} is not a directory; use newest, best or the path of one")
    if (named[0] / "checkpoints").is_dir():
        raise UserError(f"the checkpoint {which} is a run; name one of {named[0] / 'checkpoints'}")
    return [named[0].resolve()]


def read_averages(model: nn.Module, source: OpenCheckpoint, agreement: Agreement) -> None:
    """Replace the weights in `model`, sharded or not, by their moving averages in `source` (a collective).

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if not any(name.startswith(_AVERAGE) for name in source.shapes):
        raise UserError(f"{source.directory} holds no averages: its run had ema.decay=null")
    targets = {
        f"{_AVERAGE}{name}": value
        for name, value in model_state(model).items()
        if f"{_AVERAGE}{name}" in source.shapes and isinstance(value, Tensor)
    }
    with torch.no_grad():
        agreement.everywhere(lambda: source.read_into(targets))


def load_model(model: nn.Module, source: OpenCheckpoint, device: torch.device) -> None:
    """Load the model's state, and those of its other buffers that were saved in the same size."""
    make_buffers(model, source, device)
    held = model_state(model)
    targets = model_targets(held, source.shapes, source.left_out)
    others = {f"buffers.{name}": buffer for name, buffer in buffers_outside(model, set(held)).items()}
    targets |= {
        name: buffer
        for name, buffer in others.items()
        if source.shapes.get(name) == (buffer.shape, buffer.dtype)
    }
    with torch.no_grad():
        source.read_into(targets)
    load_model_state(model, put_together(source.facts["state"]["model"], targets))
