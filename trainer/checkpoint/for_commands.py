"""The checkpoint of a run that a command means (newest, best or a path), read into the run's model."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.left_out import check_left_out
from trainer.checkpoint.listing import Listing, all_found, best_of
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified_by_all
from trainer.checkpoint.restoring import load_model
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement
from trainer.errors import Fault, UserError
from trainer.files.address import Address, Location, location
from trainer.model.plain_names import model_state

_AVERAGE = "ema.weights."


def read_model(
    model: nn.Module,
    run_dir: Location,
    run_id: str | None,
    which: str,
    settings: CheckpointConfig,
    agreement: Agreement,
    device: torch.device,
    frozen: Mapping[str, str],
) -> OpenCheckpoint:
    """Load a checkpoint into `model`, sharded or not, and return it (a collective).

    Changes nothing in `run_dir`. A run may be writing there.

    Args:
        run_id: of the run that `newest` and `best` mean; None for any.
        device: where the model computes.
        which: newest (of those that verify), best (by the metric of `settings`), or a path.
        frozen: `frozen_digests` of the model.

    Raises:
        UserError: on every rank alike: there is none, it is damaged, or it is of another model.
    """

    found = agreement.on_main(lambda: candidates(run_dir, run_id, which, settings))
    alone = len(found) == 1
    source = verified_by_all(found[0], agreement) if alone else first_intact(found, agreement)

    def load() -> None:
        check_left_out(source, frozen)
        load_model(model, source, device)

    agreement.everywhere(load)
    return source


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


def candidates(
    run_dir: Location, run_id: str | None, which: str, settings: CheckpointConfig
) -> list[Location]:
    """Return the checkpoints that `which` may mean, to be tried in order.

    What a lost disk no longer has is looked for at `checkpoint.remote`.

    Raises:
        UserError: there is none.
    """
    listing: Listing[Any] = Listing(run_dir / "checkpoints", run_id)
    remote = settings.remote if isinstance(run_dir, Path) else None
    if which == "best":
        if (best := settings.keep_best) is None:
            raise UserError(
                f"{run_dir} was not told what is best: its checkpoint.keep_best is null; add for instance "
                "'checkpoint.keep_best={metric: eval/loss, mode: min}'"
            )
        evaluations = Evaluations.read(run_dir)
        if remote is not None:
            with contextlib.suppress(UserError, Fault):  # `all_found` says why
                evaluations.merge(Evaluations.read(Address(remote)))
        own = {each.path: each.manifest for each in all_found(listing, remote) if each.manifest is not None}
        if not (chosen := best_of(own, best, evaluations)):
            raise UserError(f"{run_dir} has no checkpoint with a finite {best.metric}")
        return chosen
    if which == "newest":
        if not (found := listing.found() or all_found(listing, remote)):
            raise UserError(f"{run_dir} has no checkpoint: {run_dir / 'checkpoints'} holds none of this run")
        return [each.path for each in found]
    named = [path for path in (location(which), run_dir / "checkpoints" / which) if path.is_dir()]
    if not named:
        raise UserError(f"the checkpoint {which} is not a directory; use newest, best or the path of one")
    if (named[0] / "checkpoints").is_dir():
        raise UserError(f"the checkpoint {which} is a run; name one of {named[0] / 'checkpoints'}")
    return [named[0].resolve()]
