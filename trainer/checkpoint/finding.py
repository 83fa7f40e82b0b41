"""Which checkpoint a run resumes from, or a command means, and whether it is of this run and its data."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.listing import Listing, all_found
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified_by_all
from trainer.distributed.agreement import Agreement
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import printable

log = logging.getLogger(__name__)

_MAY_DIFFER = ("run_dir", "resume", "checkpoint.remote")  # prefixes; changes are not logged


def opened_for(
    resume: str, own: Listing[Path], remote: str | None, agreement: Agreement
) -> OpenCheckpoint | None:
    """The checkpoint that ``resume`` means, verified; each rank reads its share of it (a collective).

    None if there is none in ``own`` and at ``remote`` for "auto".
    """
    if resume != "auto":
        return verified_by_all(agreement.on_main(lambda: _existing(resume)), agreement)
    found = agreement.on_main(lambda: [each.path for each in all_found(own, remote)])
    if not found:
        log.info("resume=auto: no checkpoint in %s, starting a new run", own.root)
        return None
    where = printable(found[0].parent)
    more = f"; `python -m trainer.checkpoint verify {where}` shows all, another run_dir starts a new run"
    return first_intact(found, agreement, more)


def _existing(resume: str) -> Path:
    """The directory of the checkpoint that ``resume`` names. UserError if there is none, or it is a run."""
    directory = Path(resume).resolve()
    if not directory.is_dir():
        raise UserError(f"resume={resume} is not a directory; give a checkpoint, or run_dir=DIR resume=auto")
    if (directory / "checkpoints").is_dir():
        raise UserError(
            f"resume={resume} is a run; give one of its checkpoints, or run_dir={resume} resume=auto"
        )
    return directory


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
