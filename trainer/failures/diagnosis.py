"""Which rank stopped first, from what is known of every rank. Uses no clock and no process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.failures.heartbeat import PHASES

UNHEARD_S = 2.0  # a host whose reports stop for this long is lost or cut off
ASLEEP_S = 3.0  # a watch that has not run for this long is blocked: its process holds the interpreter
_MOST = 0.8  # of timeout_s: who waits is asked from a tenth of it on
_FAR = 10  # batches of an evaluation: see _stuck


@dataclass(frozen=True)
class Observed:
    """What is known of one rank. All times are seconds ago.

    Attributes:
        heard_s: the age of this: 0 for a rank of this host, for another the age of its host's last report.
        state: running | stopped (by SIGSTOP or a debugger) | dead.
        position: phases entered, as in a heartbeat; `buckets` of gradients sent.
        silent_s: since its last progress.
        asleep_s: since its own watch was awake.
        ended_s: since it died, or recorded its end.
        death: how it died, if that could be seen.
        status: the exit status that it recorded; None: none.
        error: the last line of the exception that it recorded.
        orderly: that exception is an end with a complete message, which usually all ranks have.
        symptom: that exception is of communication: others may have caused it.
        where: file, line and function of the innermost frame of the user's code, else of the innermost.
        waits: its stack shows that it waits in communication.
        waited_s: for how long its stacks have shown that at one place.
        worker: the state of its data worker, if that is stuck.
        patience_s: how long it may wait for the disk, while it does: its silence is then no failure.
        finished: the last step whose state is whole in its memory; 0 if that is not known.
    """

    rank: int
    host: int
    hostname: str
    pid: int
    phase: str = "set_up"
    step: int = 0
    position: int = 0
    buckets: int = 0
    bucket: int | None = None
    heard_s: float = 0.0
    silent_s: float = 0.0
    asleep_s: float = 0.0
    state: str = "running"
    ended_s: float | None = None
    death: str | None = None
    status: int | None = None
    error: str | None = None
    orderly: bool = False
    symptom: bool = False
    where: str | None = None
    waits: bool = False
    waited_s: float = 0.0
    worker: str | None = None
    patience_s: float = 0.0
    finished: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.hostname}, pid {self.pid})"

    @property
    def failed_by_itself(self) -> bool:
        """Whether it recorded an exception of its own, or is dead without a record."""
        if self.status is None:
            return self.state == "dead"
        return self.status != 0 and not self.symptom

    @property
    def ended_ago_s(self) -> float:
        """Seconds since it ended, if it has; for another host's rank, from its report."""
        return (self.ended_s or 0.0) + self.heard_s

    @property
    def doing(self) -> str:
        phase = PHASES[self.phase]
        if self.bucket is not None:
            phase += f" (bucket {self.bucket} handed over)"
        if self.patience_s:
            phase += " (waiting for the disk)"
        return f"{phase} of step {self.step}" if self.step else f"{phase} before the first step"

    def is_late(self, timeout_s: float) -> bool:
        """Whether it has kept others waiting too long; a process that cannot run does not wait for a disk."""
        waits = self.patience_s and self.state == "running" and self.asleep_s + self.heard_s < ASLEEP_S
        return self.silent_s + self.heard_s >= (max(timeout_s, self.patience_s) if waits else timeout_s)


@dataclass(frozen=True)
class Failure:
    """The ranks to look at first. `status` is the exit status of every rank of the run.

    The `saving_host` saves the last finished step. Then the ranks `survivors` do so without the others; none:
    the run ends.
    """

    ranks: tuple[int, ...]
    kind: str  # orderly | raised | died | lost | stopped | hangs | unknown
    status: int
    message: str
    facts: Mapping[str, object] = field(default_factory=dict)  # rank, host, phase, where, step, silent_s
    saving_host: int | None = None
    survivors: tuple[int, ...] = ()

    def followed_by(self, words: str) -> "Failure":
        return replace(self, message=f"{self.message}; {words}") if words else self


def takes_part(rank: Observed) -> bool:
    """Whether it is at work, or waits for the failure: it can still save, or go on."""
    is_awake = rank.asleep_s < ASLEEP_S and rank.heard_s < UNHEARD_S
    return rank.state == "running" and is_awake and (rank.status is None or rank.symptom)


def diagnose(ranks: Sequence[Observed], timeout_s: float, pressing: bool) -> Failure | None:
    """Decide who stopped first, or return None if nothing has failed yet.

    Args:
        pressing: some rank's communication has failed, and others have had time to say why; otherwise only
            certain knowledge counts, or a silence of `timeout_s`.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    if failure := _first_that_ended(ranks):
        return failure
    if pressing or _stuck(ranks, timeout_s):
        return _first_that_waits(ranks)
    return None


def _first_that_ended(ranks: Sequence[Observed]) -> Failure | None:
    """The first rank that failed by itself: a fact, independent of what the others wait for."""
    ended = [rank for rank in ranks if rank.failed_by_itself]
    if not ended:
        return None
    first = max(ended, key=lambda rank: rank.ended_ago_s)
    at = f", at {first.where}" if first.where else ""
    if first.orderly:
        return _failure(first, "orderly", str(first.error), first.status or 1)
    if first.status is not None:
        worker = f"; {first.worker}" if first.worker else ""
        return _failure(first, "raised", f"failed in {first.doing}{at}: {first.error}{worker}")
    death = first.death or "is gone without a message"
    return _failure(first, "died", f"{death}, in {first.doing}{at}")


def _stuck(ranks: Sequence[Observed], timeout_s: float) -> bool:
    """Whether some rank has been silent, and has kept the others waiting, for `timeout_s`.

    Its own silence is not enough: a phase may take long on all ranks (the set-up, a save to a slow
    disk), and slightly longer on one. A rank behind all others waits for none. If no rank is behind,
    only a silence of all counts. Before the second step torch may compile for that long on all ranks: then
    one must also have waited in the same place for most of that time.
    """
    alive = [rank for rank in ranks if rank.status is None or rank.symptom]
    if len(alive) < 2:
        return False
    last = min(alive, key=_progress)
    if not last.is_late(timeout_s):
        return False
    if ahead := [rank for rank in alive if _progress(rank) > _progress(last)]:
        if any(rank.silent_s + rank.heard_s >= timeout_s for rank in ahead):
            return True
        # No rank waits in the middle of an evaluation, which may be long.
        return last.phase == "evaluate" and any(rank.position > last.position + _FAR for rank in ahead)
    unheard = any(rank.heard_s >= timeout_s for rank in alive)
    waits = any(rank.waited_s >= _MOST * timeout_s for rank in alive)  # for one that compiles, or hangs
    return (last.step > 1 or unheard or waits) and all(rank.is_late(timeout_s) for rank in alive)


def _first_that_waits(ranks: Sequence[Observed]) -> Failure:
    """The failure from the most reliable sign to the least."""
    silent = [rank for rank in ranks if rank.status is None or rank.symptom]
    if unheard := [rank for rank in silent if rank.heard_s >= UNHEARD_S]:
        return _lost(unheard)
    if stopped := [rank for rank in silent if rank.state == "stopped"]:
        first = min(stopped, key=_progress)
        message = f"is stopped (SIGSTOP, or a debugger) in {first.doing}"
        return _failure(first, "stopped", f"{message}, for {first.silent_s:.1f} s")
    quiet = [rank for rank in silent if not rank.symptom]  # the others have timed out, and reported it
    if quiet:
        behind = _first_of(quiet)
        if len(behind) == 1:
            return _hangs(behind[0])
    if quiet and len(quiet) < len(silent):
        return _hangs(min(quiet, key=_progress))
    return _unknown(ranks)


def _first_of(quiet: Sequence[Observed]) -> Sequence[Observed]:
    """The ranks that the others wait for: asleep, behind, or not waiting themselves; several if unsure."""
    asleep = [rank for rank in quiet if rank.asleep_s >= ASLEEP_S]
    if asleep and len(asleep) < len(quiet):
        return asleep
    slowest = min(map(_progress, quiet))
    behind = [rank for rank in quiet if _progress(rank) == slowest]
    at_disk = [rank for rank in behind if rank.patience_s]
    busy = [rank for rank in behind if not rank.waits]
    return at_disk or busy or behind


def stand_still(ranks: Sequence[Observed], for_s: float) -> bool:
    """Whether several ranks are at work, and none has shown progress for `for_s`."""
    alive = [rank for rank in ranks if rank.status is None]
    return len(alive) > 1 and all(rank.silent_s >= for_s for rank in alive)


def slow(ranks: Sequence[Observed]) -> Observed | None:
    """Of ranks without progress, the one that all the others wait for; None if unknown."""
    alive = [rank for rank in ranks if rank.status is None]
    last, second = sorted(alive, key=_progress)[:2]
    if _progress(last) < _progress(second):
        return last
    busy = [rank for rank in alive if rank.where is not None and not rank.waits]
    return next((rank for rank in alive if rank.patience_s), busy[0] if len(busy) == 1 else None)


def _progress(rank: Observed) -> tuple[int, int]:
    return rank.position, rank.buckets


def _hangs(rank: Observed) -> Failure:
    at = f", at {rank.where}" if rank.where else ""
    message = f"hangs in {rank.doing} for {rank.silent_s + rank.heard_s:.1f} s{at}"
    if rank.asleep_s >= ASLEEP_S:
        message += "; it does not let go of the interpreter"
    if rank.worker:
        message += f"; {rank.worker}"
    return _failure(rank, "hangs", message)


def _lost(unheard: Sequence[Observed]) -> Failure:
    first = min(unheard, key=lambda rank: rank.rank)
    hosts = sorted({(rank.host, rank.hostname) for rank in unheard})
    of_hosts = " and ".join(f"host {host} ({name})" for host, name in hosts)
    names = ", ".join(f"rank {rank.rank}" for rank in unheard)
    age = max(rank.heard_s for rank in unheard)
    message = (
        f"{of_hosts} with {names}: not heard of for {age:.1f} s, lost or cut off; "
        f"rank {first.rank} was last heard of in {first.doing}"
    )
    return Failure(tuple(rank.rank for rank in unheard), "lost", 1, message, _facts(first))


def _unknown(ranks: Sequence[Observed]) -> Failure:
    """Communication failed, but every process seems to be alive."""
    said = [rank for rank in ranks if rank.symptom] or list(ranks)
    first = max(said, key=lambda rank: rank.ended_s or 0.0)
    message = f"cannot continue in {first.doing}: {first.error or 'all ranks wait'}"
    return _failure(
        first,
        "unknown",
        f"{message}; no process is gone, stopped or behind: perhaps ranks call different collectives"
        f"{_places(ranks)}",
    )


def _places(ranks: Sequence[Observed]) -> str:
    """Where the ranks are: of each place the first rank, the rarest places first."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.where:
            places.setdefault(rank.where, []).append(rank.rank)
    rarest = sorted(places.items(), key=lambda place: len(place[1]))[:3]
    said = [
        f"rank {at[0]}{f' and {len(at) - 1} more' if len(at) > 1 else ''} at {place}" for place, at in rarest
    ]
    return ": " + ", ".join(said) if said else ""


def _failure(rank: Observed, kind: str, message: str, status: int = 1) -> Failure:
    return Failure((rank.rank,), kind, status, f"{rank.name} {message}", _facts(rank))


def _facts(rank: Observed) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "host": rank.hostname,
        "phase": "all_reduce" if rank.bucket is not None else rank.phase,
        "where": rank.where,
        "step": rank.step,
        "silent_s": round(rank.silent_s + rank.heard_s, 1),
    }
