"""At a verdict, one survivor saves the last finished step: which one, and only if its replicas agree with it.

No collective is left to agree with: the leader of a host writes what it asks for beside its heartbeat, and
the ranks of that host answer there.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from trainer.errors import RunEndError, UserError, in_a_line
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.neighbour import Neighbour
from trainer.faults.verdict import ASLEEP_S, UNHEARD_S, Observed, Verdict

SAVE_S = 25.0  # launchers kill what is left 30 s after the first end
_HASHES_S = 2.0  # for the hashes of the other survivors of this host
_LOOK_S = 0.02
_NOTHING = "no step is saved"
_NOBODY = "no rank is left that holds one, or the hosts cannot agree on one"


class LastStep(Protocol):
    """This rank's state after the last finished step.

    Every method raises UserError, in a phrase, for a reason why it is not saved.
    """

    def freeze(self, failed: bool) -> int:
        """Keep the state as it is from now on, and return its step; `failed`: the main thread has ended."""

    def fingerprint(self) -> int | None:
        """A hash that is equal on all ranks; None if none need be equal."""

    def save(self) -> bool:
        """Write the state as a checkpoint, without any other rank; False if the newest is of this step."""

    why_not: str | None
    """Why no rank of this run can save it alone."""


def choose(ranks: Sequence[Observed], blamed: Sequence[int]) -> int | None:
    """The survivor to save: of the largest step, on rank 0's host if there is a choice; None without one.

    Those that the verdict is about are `blamed`. No rank finishes a step before all have given their
    gradients for it, so survivors are at most one step apart.
    """
    alive = [rank for rank in ranks if rank.rank not in blamed and rank.finished and _can_save(rank)]
    if not alive:
        return None
    return min(alive, key=lambda rank: (-rank.finished, rank.host != ranks[0].host, rank.rank)).rank


def _can_save(rank: Observed) -> bool:
    is_awake = rank.asleep_s < ASLEEP_S and rank.heard_s < UNHEARD_S
    return rank.state == "running" and is_awake and (rank.status is None or rank.symptom)


def with_words(verdict: Verdict, words: str) -> Verdict:
    """The verdict with what became of the save."""
    return replace(verdict, message=f"{verdict.message}; {words}") if words else verdict


class Rescue:
    """This rank's part in saving at a fault.

    Args:
        here: the ranks of this host, this one among them.

    Attributes:
        last_step: set once the run has a state.
        has_begun: whether a rank of this host was asked to save; this process must not end then.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, here: Mapping[int, Neighbour]) -> None:
        self._heartbeat, self._rank, self._here = heartbeat, rank, here
        self.last_step: LastStep | None = None
        self._said: dict[str, Any] = {}
        self._asked: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def serve(self) -> None:
        """Begin what the leader of this host asks for, if it does."""
        if self.last_step is None or (self._thread is not None and self._thread.is_alive()):
            return
        for rank, neighbour in self._here.items():
            ask = neighbour.records.rescue().get("ask")
            if ask and ask != self._asked and (rank == self._rank or not _is_dead(neighbour)):
                self._begin(ask)  # again if a saver has died
                return

    def lead(self, verdict: Verdict, wait: Callable[[float], None]) -> str:
        """Have `verdict.saver` save if it is on this host; return what became of it, in a phrase.

        Args:
            wait: waits for so many seconds, and keeps this rank awake.
        """
        if (words := self._why_not()) is not None:
            return words
        if verdict.saver is None:
            return f"{_NOTHING}: {_NOBODY}" if self._heartbeat.finished else ""
        if verdict.saver not in self._here:
            return f"rank {verdict.saver} saves the last step"
        until = time.monotonic() + SAVE_S
        among = [rank for rank in self._here if rank not in verdict.ranks]
        # Those on the saver's host hold the state, too: if it dies, the next one saves.
        others = sorted(among, key=lambda rank: -self._here[rank].records.main().finished)
        for saver in dict.fromkeys([verdict.saver, *others]):
            if (words := self._have_saved(saver, among, until, wait)) is not None:
                return words
        return f"{_NOTHING}: rank {verdict.saver} died while it saved"

    def _have_saved(
        self, saver: int, among: Sequence[int], until: float, wait: Callable[[float], None]
    ) -> str | None:
        """Have `saver` save; return what became of it, in a phrase, or None if it died."""
        left = [rank for rank in among if not _is_dead(self._here[rank])]
        self._tell(ask={"saver": saver, "among": left})
        while time.monotonic() < until:
            self.serve()
            said = self._here[saver].records.rescue()
            if said.get("for") == saver and "words" in said:
                return str(said["words"])
            if _is_dead(self._here[saver]):
                return None
            wait(_LOOK_S)
        return f"{_NOTHING}: rank {saver} was not done in {SAVE_S:.0f} s"

    def save_alone(self) -> str:
        """Save as the last rank of this host, in its main thread; return what became of it, in a phrase."""
        if (words := self._why_not()) is not None:
            return words
        if not self._heartbeat.finished:
            return ""
        thread = self._begin({"saver": self._rank, "among": []})
        thread.join(SAVE_S)
        return str(self._said.get("words", f"{_NOTHING}: it was not done in {SAVE_S:.0f} s"))

    def _why_not(self) -> str | None:
        """Why no rank can save, in a phrase: empty before the first step; None if a rank can save."""
        if self.last_step is None or not self._heartbeat.step:
            return ""
        return None if self.last_step.why_not is None else f"{_NOTHING}: {self.last_step.why_not}"

    def _begin(self, ask: dict[str, Any]) -> threading.Thread:
        self._asked = ask
        self._thread = threading.Thread(target=self._answer, args=(ask,), name="rescue", daemon=True)
        self._thread.start()
        return self._thread

    def _answer(self, ask: dict[str, Any]) -> None:
        try:
            words = self._save(ask)
        except RunEndError as error:
            words = f"{_NOTHING}: {error}"
        except Exception as error:
            words = f"{_NOTHING}: {in_a_line(error)}"
        self._tell(words=words, **{"for": ask["saver"]})

    def _save(self, ask: dict[str, Any]) -> str:
        assert self.last_step is not None
        began = time.monotonic()
        step = self.last_step.freeze(failed=self._here[self._rank].records.note() is not None)
        if len(ask["among"]) > 1:
            own = self.last_step.fingerprint()
            self._tell(step=step, hash=own)
            if self._rank == ask["saver"] and own is not None:
                self._compare(own, step, [rank for rank in ask["among"] if rank != self._rank])
        if self._rank != ask["saver"]:
            return ""
        if not self.last_step.save():
            return f"step {step} is saved"
        return f"step {step} is saved, by rank {self._rank} in {time.monotonic() - began:.1f} s"

    def _compare(self, own: int, step: int, others: Sequence[int]) -> None:
        """Raise UserError unless most survivors of this host that are at `step` hold the same bits."""
        deadline = time.monotonic() + _HASHES_S
        while time.monotonic() < deadline:
            said = {rank: self._here[rank].records.rescue() for rank in others}
            if all("words" in theirs or _is_dead(self._here[rank]) for rank, theirs in said.items()):
                break
            time.sleep(_LOOK_S)
        there = {rank: theirs for rank, theirs in said.items() if theirs.get("step") == step}
        differ = [rank for rank, theirs in there.items() if theirs.get("hash") != own]
        if 2 * len(differ) > len(there):
            named = ", ".join(map(str, differ))
            raise UserError(f"replicas differ: rank {self._rank} from rank {named} after step {step}")

    def _tell(self, **facts: Any) -> None:
        self._said |= facts
        self._heartbeat.note_rescue(self._said)


def _is_dead(neighbour: Neighbour) -> bool:
    neighbour.look_for_death()
    return neighbour.died_at_ns is not None
