"""Which ranks save the last finished step and go on after a failure, and this rank's part in saving.

No collective is left to agree with: the leader of a host notes which rank is to save, and that rank answers
in its own notes. If it dies, too, the next rank of the host saves.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trainer.errors import RunEndError, class_and_line
from trainer.failures.diagnosis import UNHEARD_S, Failure, Observed, takes_part
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.neighbour import Neighbour
from trainer.failures.processes import EXITED

SAVE_S = 25.0  # launchers kill what is left 30 s after the first end
_LOOK_S = 0.02
_NOTHING = "no step is saved"


class LastStep(Protocol):
    """This rank's state after the last finished step.

    Both methods raise UserError, in a phrase, for a reason why it is not saved.
    """

    def freeze(self, failed: bool) -> int:
        """Keep the state as it is from now on, and return its step; `failed`: the main thread has ended."""

    def save(self) -> bool:
        """Write the state as a checkpoint, without any other rank; False if the newest is of this step."""

    def thaw(self) -> None:
        """Let the state change again: the main thread may be about to."""


def savers(ranks: Sequence[Observed], blamed: Sequence[int], own: int | None = None) -> list[Observed]:
    """The ranks that may save, the best first: of the largest step, then of rank 0's host, then the lowest.

    Those that the failure is about are `blamed`: after the others. Without an exception of its own, a rank
    that hangs may still save. No rank finishes a step before all have given their gradients for it, so they
    are at most one step apart.

    Args:
        own: a rank that may save in any case.
    """
    able = [rank for rank in ranks if takes_part(rank) or rank.rank == own]
    return sorted(able, key=lambda r: (r.rank in blamed, -r.finished, r.host != ranks[0].host, r.rank))


def saving_host(ranks: Sequence[Observed], blamed: Sequence[int]) -> int | None:
    """The host to save; None if no rank may.

    What is known of another host's ranks may be many seconds old, or from before their first step: so which
    of them saves is known only there. A host with only ranks that are `blamed` saves if there is no other.
    """
    return next((rank.host for rank in savers(ranks, blamed)), None)


def find_survivors(ranks: Sequence[Observed], failure: Failure, by_host: bool) -> tuple[int, ...]:
    """The ranks that can go on without those that the failure is about, and without any other that is gone.

    None after an exception of user code or an exit, which may come again; in the set-up; or at the end.
    Behind a cut link, each side takes the other for lost: only the larger goes on, or of halves that with
    rank 0.

    Args:
        by_host: whether the launcher of a host ends its other ranks when one dies.
    """
    gone = [rank for rank in ranks if rank.rank in failure.ranks or not takes_part(rank)]
    hosts = {rank.host for rank in gone} if by_host else set()
    able = [rank for rank in ranks if rank not in gone and rank.host not in hosts]
    if failure.kind not in ("died", "stopped", "hangs", "lost") or not able:
        return ()
    if any(EXITED in (rank.death or "") for rank in gone):
        return ()
    if any(not rank.step or rank.phase == "end" for rank in able):
        return ()
    more = 2 * len(able) - len(ranks) + (ranks[0] in able) / 2
    if more <= 0 and any(rank.heard_s >= UNHEARD_S for rank in gone):
        return ()
    return tuple(rank.rank for rank in able)


class SaveOnFailure:
    """This rank's part in saving at a fault.

    Args:
        here: the ranks of this host, this one among them.

    Attributes:
        last_step: set once the run has a state that one rank can save.
        why_not: why no rank can, in a phrase.
        is_saved: whether a rank of this host has saved the step, or another host is to.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, here: Mapping[int, Neighbour]) -> None:
        self._heartbeat, self._rank, self._here = heartbeat, rank, here
        self.last_step: LastStep | None = None
        self.why_not: str | None = None
        self.is_saved = False
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a rank of this host has asked one to save: none must end before that has."""
        return any({"saver", "survivors"} & each.records.notes().keys() for each in self._here.values())

    def serve(self) -> None:
        """Begin to save if a leader of this host asks this rank to."""
        asked = (neighbour.records.notes().get("saver") for neighbour in self._here.values())
        if self.last_step is not None and self._thread is None and self._rank in asked:
            self._thread = threading.Thread(target=self._save, name="fault save", daemon=True)
            self._thread.start()

    def lead(self, failure: Failure, wait: Callable[[float], None]) -> str:
        """Have this host save, if it is to; return what became of it, in a phrase.

        Args:
            wait: waits for a number of seconds, and keeps this rank awake.
        """
        if not self._heartbeat.step or (self.last_step is None and self.why_not is None):
            return ""
        if self.why_not is not None:
            return f"{_NOTHING}: {self.why_not}"
        if failure.saving_host is None:
            return ""
        if failure.saving_host != self._here[self._rank].member.host:
            self.is_saved = True
            return f"host {failure.saving_host} saves the last step"
        until = time.monotonic() + SAVE_S
        # Each rank here holds the state: if one dies, or may not save, the next one does.
        here, found = [neighbour.observe() for neighbour in self._here.values()], ""
        for saver in [rank for rank in savers(here, failure.ranks, self._rank) if rank.finished]:
            words, self.is_saved = self._result_of(saver.rank, until, wait)
            if self.is_saved:
                return words
            found = found or words
        return found

    def _result_of(self, saver: int, until: float, wait: Callable[[float], None]) -> tuple[str, bool]:
        """Have `saver` save; return what became of it, in a phrase, and whether a step is saved."""
        self._heartbeat.note(saver=saver)
        while time.monotonic() < until:
            self.serve()
            said = self._here[saver].records.notes()
            if "words" in said:
                return str(said["words"]), bool(said["is_saved"])
            if self._here[saver].look_for_death():
                return f"{_NOTHING}: rank {saver} died while it saved", False
            wait(_LOOK_S)
        return f"{_NOTHING}: rank {saver} was not done in {SAVE_S:.0f} s", False

    def _save(self) -> None:
        assert self.last_step is not None
        began = time.monotonic()
        try:
            step = self.last_step.freeze(failed="status" in self._here[self._rank].records.notes())
            is_new = self.last_step.save()
        except Exception as error:
            why = str(error) if isinstance(error, RunEndError) else class_and_line(error)
            self._heartbeat.note(words=f"{_NOTHING}: {why}", is_saved=False)
        else:
            by = f", by rank {self._rank} in {time.monotonic() - began:.1f} s" if is_new else ""
            self._heartbeat.note(words=f"step {step} is saved{by}", is_saved=True)
