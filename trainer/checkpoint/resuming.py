"""Resuming from a checkpoint: finds it, checks that it fits, and restores the state."""

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.listing import Listing, newest_of
from trainer.checkpoint.made_buffers import make_buffers
from trainer.checkpoint.matching import (
    begins_average,
    other_buffers,
    saved_state,
    targets_for,
)
from trainer.checkpoint.matching_values import check_fits
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified
from trainer.checkpoint.store import Store
from trainer.distributed.agreement import Agreement
from trainer.errors import UserError
from trainer.files.address import Address, Location
from trainer.files.untrusted import first_five, printable
from trainer.optim.train_state import Progress, TrainState

log = logging.getLogger(__name__)

_MAY_DIFFER = ("run_dir", "resume", "checkpoint.remote")  # prefixes; changes are not logged


class Resuming:
    """Finds what a run resumes from and restores it. All methods are collective."""

    def __init__(
        self,
        store: Store,
        others: tuple[Listing[Address], ...],
        agreement: Agreement,
        num_samples: int | None,
        config: Mapping[str, Any],
    ) -> None:
        """``others`` list this run's checkpoints at addresses; the rest is as for ``Checkpointer``."""
        self._store, self._others, self._agreement = store, others, agreement
        self._num_samples, self._config = num_samples, config

    def find(self, resume: str | None) -> OpenCheckpoint | None:
        """The checkpoint that ``resume`` asks to continue from, verified; None if there is none.

        First deletes what killed saves of this run left behind, and warns of checkpoints of other runs.

        Args:
            resume: None; "auto" for the newest checkpoint of this run_dir that verifies; or the path of one.

        Raises:
            UserError: on every rank alike: the checkpoint is missing, damaged, or of a run on other data.
        """
        self._agreement.on_main(self._recover)
        if resume is None:
            return None
        source = self._choose(resume)
        if source is None:
            log.info("resume=auto: no checkpoint in %s, starting a new run", self._store.root)
            return None
        self._agreement.everywhere(lambda: self._check_data(source))
        return source

    def _recover(self) -> None:
        self._store.recover()
        if names := [path.name for path in self._store.of_others()]:
            log.warning("left alone, as another run's: %s in %s", first_five(names), self._store.root)

    def restore(
        self, state: TrainState, source: OpenCheckpoint, device: torch.device
    ) -> list[dict[str, Any]]:
        """Continue from ``source``, on ``device``; returns the state of each rank's data in it.

        Raises:
            UserError: on every rank alike: it is of another model, or cannot be read.
        """
        plain = source.facts["state"]
        # No more than buffers is changed before all ranks have found that all of the state fits.
        left = self._agreement.everywhere(lambda: make_buffers(state.model, source, device))
        if self._agreement.rank == 0 and left:
            log.warning(
                "%s also holds these buffers, which the model has no place for: %s",
                source.directory,
                first_five(left),
            )
        shapes = source.shapes
        targets = self._agreement.everywhere(lambda: targets_for(state, shapes, plain))
        if self._agreement.rank == 0 and (unread := other_buffers(state, shapes)):
            log.warning(
                "%s lacks these buffers, or has them in another size; they keep their initial values: %s",
                source.directory,
                unread,
            )
        if self._agreement.rank == 0 and begins_average(state, shapes):
            log.warning(
                "ema: %s holds no averages of these weights; they begin with its weights", source.directory
            )
        self._agreement.everywhere(lambda: check_fits(state, plain, targets))
        data_states = self._agreement.everywhere(source.data_states)
        self._agreement.everywhere(lambda: source.read_into(targets))
        self._agreement.everywhere(lambda: state.load_state_dict(saved_state(plain, targets)))
        self._report(source, state.progress)
        return data_states

    def _check_data(self, source: OpenCheckpoint) -> None:
        """Raise UserError if the training data has another length than when ``source`` was saved."""
        now, then = self._num_samples, source.facts.get("num_samples", self._num_samples)
        if now != then:
            raise UserError(
                f"the training data holds {_number(now)} samples, but {_number(then)} when "
                f"{printable(source.directory)} was saved: their "
                "order is another, so some would be read twice or never; use the original data, or start a "
                f"new run from these weights with model.init_from={source.directory}"
            )

    def _choose(self, resume: str) -> OpenCheckpoint | None:
        """The checkpoint that ``resume`` means, verified; each rank reads its share of it. Collective."""

        def read(directory: Location) -> OpenCheckpoint:
            look = partial(verified, directory, self._agreement.rank, self._agreement.world_size)
            return self._agreement.everywhere(look)

        if resume != "auto":
            return read(self._agreement.on_main(lambda: _existing(resume)))
        found = self._agreement.on_main(lambda: newest_of(self._store, self._others))
        if not found:
            return None
        where = printable(found[0].parent)
        more = f"; `python -m trainer.checkpoint verify {where}` shows all, another run_dir starts a new run"
        return first_intact(found, read, self._agreement.rank == 0, more)

    def _report(self, source: OpenCheckpoint, progress: Progress) -> None:
        """Log the step, and which settings have changed."""
        if self._agreement.rank != 0:
            return
        log.info("resumed from %s at step %d", source.directory, progress.step)
        then, now = source.facts["config"], self._config
        for key in sorted(key for key in then.keys() | now.keys() if not key.startswith(_MAY_DIFFER)):
            if key not in now:
                log.info("  %s was %s in the checkpoint, and is not a setting now", *_shown(key, then[key]))
            elif key not in then:
                log.info("  %s is %r now, and was not a setting in the checkpoint", key, now[key])
            elif then[key] != now[key]:
                log.info("  %s was %s in the checkpoint, is %r now", *_shown(key, then[key]), now[key])


def _number(num_samples: int | None) -> str:
    return "an unknown number of" if num_samples is None else str(num_samples)


def _shown(key: str, value: Any) -> tuple[str, str]:
    return printable(key), printable(repr(value))


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
        others = (Listing(Address(remote) / "checkpoints", run_id),) if remote is not None else ()
        candidates = newest_of(Listing(run_dir / "checkpoints", run_id), others)
    for directory in candidates:
        with contextlib.suppress(UserError):
            return OpenCheckpoint.open(directory).config
    return {}


def _existing(resume: str) -> Path:
    """The directory of the checkpoint that ``resume`` names. UserError if there is none, or it is a run."""
    directory = Path(resume).resolve()
    if not directory.is_dir():
        raise UserError(f"resume={resume} is not a directory; give the path of a checkpoint, or resume=auto")
    if (directory / "checkpoints").is_dir():
        raise UserError(
            f"resume={resume} is a run; give one of its checkpoints, or run_dir={resume} resume=auto"
        )
    return directory
