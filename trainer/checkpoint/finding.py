"""The checkpoint that a run resumes from, or that a command means and reads into its model."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import Listing, all_found, best_of
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified_by_all
from trainer.checkpoint.restoring import check_left_out, load_model
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement
from trainer.errors import RetryableError, UserError
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import printable
from trainer.model.plain_names import model_state

log = logging.getLogger(__name__)

_AVERAGE = "ema.weights."
_MAY_DIFFER = ("run_dir", "resume", "checkpoint.remote")  # prefixes; changes are not logged


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
            with contextlib.suppress(UserError, RetryableError):  # `all_found` says why
                evaluations.merge(Evaluations.read(Address(remote)))
        own = {each.path: each.manifest for each in all_found(listing, remote) if each.manifest is not None}
        if not (chosen := best_of(own, best, evaluations)):
            raise UserError(f"{run_dir} has no checkpoint with a finite {best.metric}")
        return chosen
    if which == "newest":
        if not (found := listing.found() or all_found(listing, remote)):
            raise UserError(f"{run_dir} has no checkpoint: {run_dir / 'checkpoints'} holds none of this run")
        return [each.path for each in found]
    below = run_dir / "checkpoints" / which
    named = below if below.is_dir() else location(which)
    return [_named(f"the checkpoint {which}", named, "use newest, best or the path of a checkpoint")]


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


def opened_for(
    resume: str, own: Listing[Path], remote: str | None, agreement: Agreement
) -> OpenCheckpoint | None:
    """The checkpoint that ``resume`` means, verified; each rank reads its share of it (a collective).

    None if there is none in ``own`` and at ``remote`` for "auto".
    """
    if resume != "auto":
        way_out = "give the path of a checkpoint, or run_dir=DIR resume=auto"
        named = agreement.on_main(lambda: _named(f"resume={resume}", Path(resume), way_out))
        return verified_by_all(named, agreement)
    found = agreement.on_main(lambda: [each.path for each in all_found(own, remote)])
    if not found:
        log.info("resume=auto: no checkpoint in %s, starting a new run", own.root)
        return None
    where = printable(found[0].parent)
    more = f"; `python -m trainer.checkpoint verify {where}` shows all, another run_dir starts a new run"
    return first_intact(found, agreement, more)


def _named(what: str, directory: Location, way_out: str) -> Location:
    """``directory``. UserError about ``what`` unless it is a directory, and not that of a run."""
    if not directory.is_dir():
        raise UserError(f"{what} is not a directory; {way_out}")
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{what} is a run; {way_out}")
    return directory.resolve()


def check_data(source: OpenCheckpoint, now: int | None) -> None:
    """Raise UserError if the training data has another length ``now`` than when ``source`` was saved."""
    then = source.facts["num_samples"]
    if now != then:
        lengths = ["an unknown number of" if number is None else number for number in (now, then)]
        raise UserError(
            f"the training data holds {lengths[0]} samples, but {lengths[1]} when "
            f"{printable(source.directory)} was saved: their order is another, so some would be read twice "
            "or never; use the original data, or start a new run from these weights with "
            f"model.init_from={source.directory}"
        )


def tell_what_changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log which settings are others than in a checkpoint; not those that another strategy alone has."""
    for key in sorted(key for key in then.keys() | now.keys() if not key.startswith(_MAY_DIFFER)):
        was, is_now = (printable(repr(each[key])) if key in each else "no setting" for each in (then, now))
        if was != is_now and not (key.startswith("strategy.") and "no setting" in (was, is_now)):
            log.info("  %s was %s in the checkpoint, is %s now", printable(key), was, is_now)


def saved_settings_of(
    run_dir: Path, run_id: str, resume: str | None, remote: str | None = None
) -> Mapping[str, Any]:
    """The settings of the run that ``resume`` continues, by their dotted names; {} if there is none.

    Called on rank 0, before anything is built. Of a checkpoint only the facts are read, and not verified.

    Args:
        remote: as `checkpoint.remote`.
    """
    candidates: list[Location] = [Path(resume or "")]
    if resume == "auto":
        own = Listing(run_dir / "checkpoints", run_id)
        candidates = [each.path for each in all_found(own, remote)]
    for directory in candidates:
        with contextlib.suppress(UserError):
            return OpenCheckpoint.open(directory).config
    return {}
