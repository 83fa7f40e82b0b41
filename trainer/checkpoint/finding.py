"""Find the checkpoint from which a run resumes, or which a command loads."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import SET_ASIDE, Listing, all_checkpoints, best_of
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, no_averages, verified_by_all
from trainer.checkpoint.restoring import check_left_out, load_model
from trainer.config import CheckpointConfig
from trainer.distributed.agreement import Agreement
from trainer.errors import RetryableError, UserError
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import printable
from trainer.model.plain_names import model_state

log = logging.getLogger(__name__)

_AVERAGE = "ema.weights."
_MAY_DIFFER = ("run_dir", "resume", "checkpoint.remote")  # prefixes of settings whose changes are not logged


def candidates(
    run_dir: Location, run_id: str | None, which: str, settings: CheckpointConfig
) -> list[Location]:
    """Return the checkpoints that `which` can refer to, in the order in which to try them.

    Checkpoints at `checkpoint.remote` are included, because the run's disk may be lost.
    """
    listing: Listing[Any] = Listing(run_dir / "checkpoints", run_id)
    remote = settings.remote if isinstance(run_dir, Path) else None
    if which == "best":
        if (best := settings.keep_best) is None:
            raise UserError(
                f"the best checkpoint of {run_dir} is not defined, because its checkpoint.keep_best is null; "
                "pass, for example, 'checkpoint.keep_best={metric: eval/loss, mode: min}'"
            )
        evaluations = Evaluations.read(run_dir)
        if remote is not None:
            with contextlib.suppress(UserError, RetryableError):  # `all_checkpoints` reports the error
                evaluations.merge(Evaluations.read(Address(remote)))
        own = {
            each.path: each.manifest for each in all_checkpoints(listing, remote) if each.manifest is not None
        }
        if not (chosen := best_of(own, best, evaluations)):
            raise UserError(f"{run_dir} has no checkpoint with a finite {best.metric}")
        return chosen
    if which == "newest":
        if not (listed := listing.checkpoints() or all_checkpoints(listing, remote)):
            raise UserError(f"{run_dir} has no checkpoint in {run_dir / 'checkpoints'}")
        return [each.path for each in listed]
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
    frozen: Mapping[str, str],
) -> OpenCheckpoint:
    """Load a checkpoint into `model`, sharded or not, and return the checkpoint (a collective).

    Args:
        run_id: the run whose checkpoints `newest` and `best` refer to; None for all runs.
        which: "newest" for the newest intact checkpoint, "best" for the best by the metric of `settings`, or
            a path.

    Raises:
        UserError: on every rank, if the checkpoint is missing, damaged or from a different model.
    """

    paths = agreement.on_main(lambda: candidates(run_dir, run_id, which, settings))
    is_only = len(paths) == 1
    source = verified_by_all(paths[0], agreement) if is_only else first_intact(paths, agreement)

    def load() -> None:
        check_left_out(source, frozen)
        load_model(model, source)

    agreement.everywhere(load)
    return source


def read_averages(model: nn.Module, source: OpenCheckpoint, agreement: Agreement) -> None:
    """Replace the weights of `model` with their moving averages in `source` (a collective)."""
    if not any(name.startswith(_AVERAGE) for name in source.shapes):
        raise UserError(no_averages(source.directory))
    targets = {
        f"{_AVERAGE}{name}": value
        for name, value in model_state(model).items()
        if f"{_AVERAGE}{name}" in source.shapes and isinstance(value, Tensor)
    }
    with torch.no_grad():
        agreement.everywhere(lambda: source.read_into(targets))


def open_for_resume(
    resume: str, own: Listing[Path], remote: str | None, agreement: Agreement
) -> OpenCheckpoint | None:
    """Return the checkpoint that ``resume`` names, verified by all ranks together (a collective).

    Return None if ``resume`` is "auto" and there is no checkpoint in ``own`` or at ``remote``.
    """
    if resume != "auto":
        way_out = "give the path of a checkpoint, or run_dir=DIR resume=auto"
        named = agreement.on_main(lambda: _named(f"resume={resume}", Path(resume), way_out))
        return verified_by_all(named, agreement)
    paths = agreement.on_main(lambda: _usable(own, remote))
    if not paths:
        log.info("resume=auto: no checkpoint in %s; starting a new run", own.root)
        return None
    where = printable(paths[0].parent)
    more = f"; see `python -m trainer.checkpoint verify {where}`, or set another run_dir to start a new run"
    return first_intact(paths, agreement, more)


def _usable(own: Listing[Path], remote: str | None) -> list[Location]:
    """Return the checkpoints that resume=auto may use, newest first.

    Raises:
        UserError: all must be skipped (see `SetAside`), and the run started from another run's checkpoint.
    """
    found, aside = all_checkpoints(own, remote), own.aside
    newest = found[0].manifest if found else None
    if aside.after and (newest is None or newest.branch in aside.after):
        chosen = printable(found[0].path.name) if found else "step 0"
        log.warning(
            "resume=auto: continuing from %s; later checkpoints must be skipped (see %s), because %s",
            *(chosen, SET_ASIDE, printable(aside.why)),
        )
    if not found and aside.start is not None:
        raise UserError(
            f"resume=auto: all checkpoints in {own.root} must be skipped, because {printable(aside.why)}; "
            f"set resume={printable(aside.start)}, the checkpoint from which the run started"
        )
    return [each.path for each in found]


def _named(what: str, directory: Location, way_out: str) -> Location:
    if not directory.is_dir():
        raise UserError(f"{what} is not a directory; {way_out}")
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{what} is a run directory, not a checkpoint; {way_out}")
    return directory.resolve()


def check_data(source: OpenCheckpoint, now: int | None) -> None:
    """Raise UserError if the training data has ``now`` samples, but had a different number in ``source``."""
    then = source.facts["num_samples"]
    if now != then:
        lengths = ["an unknown number of" if number is None else number for number in (now, then)]
        raise UserError(
            f"the training data contains {lengths[0]} samples, but contained {lengths[1]} when "
            f"{printable(source.directory)} was saved: the sample order differs, so some samples would be "
            "read twice or never; use the original data, or start a new run from these weights with "
            f"model.init_from={source.directory}"
        )


def log_changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log the settings that changed since the checkpoint, apart from added or removed `strategy` settings."""
    for key in sorted(key for key in then.keys() | now.keys() if not key.startswith(_MAY_DIFFER)):
        was, is_now = (printable(repr(each[key])) if key in each else "not set" for each in (then, now))
        if was != is_now and not (key.startswith("strategy.") and "not set" in (was, is_now)):
            log.info("  %s was %s in the checkpoint, and is %s now", printable(key), was, is_now)


def saved_settings_of(
    run_dir: Path, run_id: str, resume: str | None, remote: str | None = None
) -> Mapping[str, Any]:
    """Return the settings of the run that ``resume`` continues, by dotted name; {} if there is none.

    Call it on rank 0. Only state.json of the checkpoint is read and verified.
    """
    candidates: list[Location] = [Path(resume or "")]
    if resume == "auto":
        own = Listing(run_dir / "checkpoints", run_id)
        candidates = [each.path for each in all_checkpoints(own, remote)]
    for directory in candidates:
        with contextlib.suppress(UserError):
            return OpenCheckpoint.open(directory).config
    return {}
