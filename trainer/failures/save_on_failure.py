"""Save the last finished step after a failure, and choose which ranks save and which ranks continue.

Collectives are no longer possible. The leader of a host notes in its heartbeat which rank must save, and that
rank answers in its own heartbeat. If that rank dies as well, the next rank on the host saves.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trainer.errors import RunEndError, class_and_line
from trainer.failures.diagnosis import UNHEARD_S, Failure, Observed, is_usable
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.neighbour import Neighbour
from trainer.failures.processes import EXITED

SAVE_S = 25.0  # launchers kill the remaining processes 30 s after the first end
_LOOK_S = 0.02
_NOT_SAVED = "no step was saved"


class LastStep(Protocol):
    """The state of this rank after the last finished step.

    `freeze` and `save` raise a UserError with a short reason if the state cannot be saved.
    """

    def freeze(self, failed: bool) -> int:
        """Prevent changes to the state, and return its step.

        Args:
            failed: whether the main thread has ended.
        """

    def save(self) -> bool:
        """Save a checkpoint without the other ranks; return False if this step has already been saved."""

    def thaw(self) -> None:
        """Allow changes to the state again."""


def savers(ranks: Sequence[Observed], blamed: Sequence[int], own: int | None = None) -> list[Observed]:
    """Return the ranks that can save, sorted by latest step, then rank 0's host first, then by rank.

    A rank that hangs without an exception may still be able to save. No rank finishes a step before all ranks
    have contributed their gradients, so ranks are at most one step apart.

    Args:
        blamed: the failed ranks, which come last.
        own: this rank, which always counts as able to save.
    """
    able = [rank for rank in ranks if is_usable(rank) or rank.rank == own]
    return sorted(able, key=lambda r: (r.rank in blamed, -r.finished, r.host != ranks[0].host, r.rank))


def saving_host(ranks: Sequence[Observed], blamed: Sequence[int]) -> int | None:
    """Return the host that must save; None if no rank can.

    The host itself then chooses the rank, because observations of other hosts may be many seconds old or
    precede their first step. A host on which all ranks are `blamed` is chosen only if there is no other host.
    """
    return next((rank.host for rank in savers(ranks, blamed)), None)


def find_survivors(ranks: Sequence[Observed], failure: Failure, by_host: bool) -> tuple[int, ...]:
    """Return the ranks that can continue without the failed ranks and other unusable ranks.

    No rank can continue during the set-up, at the end of the run, or after an exception or exit of user code,
    which could occur again. In a partitioned network, each side considers the other lost. Then only the
    larger side continues; of two equal sides, the one with rank 0.

    Args:
        by_host: whether the launcher on a host kills the host's other ranks when one rank dies.
    """
    gone = [rank for rank in ranks if rank.rank in failure.ranks or not is_usable(rank)]
    hosts = {rank.host for rank in gone} if by_host else set()
    able = [rank for rank in ranks if rank not in gone and rank.host not in hosts]
    if failure.kind not in ("died", "stopped", "hangs", "lost") or not able:
        return ()
    if any(EXITED in (rank.death or "") for rank in gone):
        return ()
    if any(not rank.step or rank.phase == "end" for rank in able):
        return ()
    majority = 2 * len(able) - len(ranks) + (ranks[0] in able) / 2
    if majority <= 0 and any(rank.heard_s >= UNHEARD_S for rank in gone):
        return ()
    return tuple(rank.rank for rank in able)


class SaveOnFailure:
    """Saves this rank's state after a failure, or makes another rank on the host save.

    Attributes:
        last_step: the state to save; None until a single rank can save it.
        why_not: a short reason why no rank can save it.
        is_saved: whether a rank on this host has saved the step, or another host saves it.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, here: Mapping[int, Neighbour]) -> None:
        self._heartbeat, self._rank, self._here = heartbeat, rank, here
        self.last_step: LastStep | None = None
        self.why_not: str | None = None
        self.is_saved = False
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the leader of this host has chosen a rank to save, so that no rank may exit yet."""
        return any({"saver", "survivors"} & each.records.notes().keys() for each in self._here.values())

    def serve(self) -> None:
        """Start saving if the leader of this host has chosen this rank to save."""
        chosen = (neighbour.records.notes().get("saver") for neighbour in self._here.values())
        if self.last_step is not None and self._thread is None and self._rank in chosen:
            self._thread = threading.Thread(target=self._save, name="save on failure", daemon=True)
            self._thread.start()

    def lead(self, failure: Failure, wait: Callable[[float], None]) -> str:
        """If this host must save, make one of its ranks do so; return a description of the outcome.

        Args:
            wait: function that sleeps for a number of seconds, and shows that this rank is awake.
        """
        if not self._heartbeat.step or (self.last_step is None and self.why_not is None):
            return ""
        if self.why_not is not None:
            return f"{_NOT_SAVED}: {self.why_not}"
        if failure.saving_host is None:
            return ""
        if failure.saving_host != self._here[self._rank].member.host:
            self.is_saved = True
            return f"host {failure.saving_host} saves the last step"
        until = time.monotonic() + SAVE_S
        # Each rank on this host has the state: if a rank dies or cannot save, the next rank saves.
        here, first_outcome = [neighbour.observe() for neighbour in self._here.values()], ""
        for saver in [rank for rank in savers(here, failure.ranks, self._rank) if rank.finished]:
            outcome, self.is_saved = self._save_on(saver.rank, until, wait)
            if self.is_saved:
                return outcome
            first_outcome = first_outcome or outcome
        return first_outcome

    def _save_on(self, saver: int, until: float, wait: Callable[[float], None]) -> tuple[str, bool]:
        """Make rank `saver` save. Return a description of the outcome, and whether the step was saved."""
        self._heartbeat.note(saver=saver)
        while time.monotonic() < until:
            self.serve()
            notes = self._here[saver].records.notes()
            if "outcome" in notes:
                return str(notes["outcome"]), bool(notes["is_saved"])
            if self._here[saver].look_for_death():
                return f"{_NOT_SAVED}: rank {saver} died during the save", False
            wait(_LOOK_S)
        return f"{_NOT_SAVED}: rank {saver} did not finish saving within {SAVE_S:.0f} s", False

    def _save(self) -> None:
        assert self.last_step is not None
        began = time.monotonic()
        try:
            step = self.last_step.freeze(failed="status" in self._here[self._rank].records.notes())
            is_new = self.last_step.save()
        except Exception as error:
            reason = str(error) if isinstance(error, RunEndError) else class_and_line(error)
            self._heartbeat.note(outcome=f"{_NOT_SAVED}: {reason}", is_saved=False)
        else:
            outcome = f"step {step} was already saved"
            if is_new:
                outcome = f"step {step} was saved by rank {self._rank} in {time.monotonic() - began:.1f} s"
            self._heartbeat.note(outcome=outcome, is_saved=True)
