"""Diagnose which rank failed first, with pure functions of observations of every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.failures.heartbeat import PHASES

UNHEARD_S = 2.0  # a host without a report for this long is lost or disconnected
ASLEEP_S = 3.0  # a watch that has not run for this long is blocked, because its process holds the GIL
_WAITED = 0.8  # the fraction of timeout_s for which a rank must have waited; see _stuck
_AHEAD = 10  # batches by which another rank must be ahead of a stuck rank in an evaluation


@dataclass(frozen=True)
class Observed:
    """An observation of one rank. Times are in seconds before now.

    Attributes:
        phase: one of `heartbeat.PHASES`.
        step: the current optimizer step, counted from 1; 0 before the first.
        position: the number of phases entered, as in a heartbeat.
        buckets: the number of gradient buckets sent.
        bucket: the last bucket sent in this phase, if any.
        heard_s: the age of the observation: 0 for this host, otherwise the age of the other host's last
            report.
        silent_s: time since its last progress.
        asleep_s: time since the watch thread of the rank was last awake.
        state: running | stopped (by SIGSTOP or a debugger) | dead.
        ended_s: time since it died or recorded its end.
        death: how the rank died, if observed.
        status: the exit status that it recorded, if any.
        error: the last line of the exception that it recorded.
        orderly: whether this exception is a `RunEndError`, which usually all ranks raise.
        symptom: whether this exception is a communication error, which another rank may have caused.
        where: file, line and function of the innermost frame of user code, or else of the innermost frame.
        waits: whether its stack shows a wait for communication.
        waited_s: how long its stacks have shown a wait at the same location.
        worker: a description of its data worker, if that is stuck.
        patience_s: the longest time for which it may wait for the disk; 0 if it is not waiting for the disk.
        finished: the last step whose state is complete in its memory; 0 if unknown.
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
        """Whether the rank died without an exception, or with an exception that no other rank caused."""
        if self.status is None:
            return self.state == "dead"
        return self.status != 0 and not self.symptom

    @property
    def ended_ago_s(self) -> float:
        """The time since the rank ended; if it has not, 0 or the age of the observation."""
        return (self.ended_s or 0.0) + self.heard_s

    @property
    def doing(self) -> str:
        text = PHASES[self.phase]
        if self.phase != "end":
            text += f" of step {self.step}" if self.step else " before the first step"
        if self.bucket is not None:
            text += f" (bucket {self.bucket} sent)"
        if self.patience_s:
            text += " (waiting for the disk)"
        return text

    def is_late(self, timeout_s: float) -> bool:
        """Return whether the rank has been silent for too long; a wait for the disk may be longer."""
        waits_for_disk = (
            self.patience_s and self.state == "running" and self.asleep_s + self.heard_s < ASLEEP_S
        )
        limit_s = max(timeout_s, self.patience_s) if waits_for_disk else timeout_s
        return self.silent_s + self.heard_s >= limit_s


@dataclass(frozen=True)
class Failure:
    """The diagnosis of a failed run.

    Attributes:
        ranks: the ranks that failed first.
        kind: orderly | raised | died | lost | stopped | hangs | unknown.
        status: the exit status of every rank of the run.
        facts: rank, host, phase, where, step and silent_s of the first failed rank, for failure.json.
        saving_host: the host that saves the last finished step.
        survivors: the ranks that continue without the failed ranks; empty if the run ends.
    """

    ranks: tuple[int, ...]
    kind: str
    status: int
    message: str
    facts: Mapping[str, object] = field(default_factory=dict)
    saving_host: int | None = None
    survivors: tuple[int, ...] = ()

    def followed_by(self, text: str) -> "Failure":
        return replace(self, message=f"{self.message}; {text}") if text else self


def is_usable(rank: Observed) -> bool:
    """Return whether the rank can save or continue, because it is working or waiting for the diagnosis."""
    is_awake = rank.asleep_s < ASLEEP_S and rank.heard_s < UNHEARD_S
    return rank.state == "running" and is_awake and (rank.status is None or rank.symptom)


def diagnose(ranks: Sequence[Observed], timeout_s: float, pressing: bool) -> Failure | None:
    """Return the first failure, or None if no rank has failed yet.

    Args:
        pressing: whether the communication of a rank has failed, and other ranks have had time to report a
            cause. Otherwise, a rank counts as failed only if it has ended or been silent for `timeout_s`.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    if failure := _first_that_ended(ranks):
        return failure
    if pressing or _stuck(ranks, timeout_s):
        return _first_that_waits(ranks)
    return None


def _first_that_ended(ranks: Sequence[Observed]) -> Failure | None:
    """Return the failure of the first rank that failed by itself; None if no rank did."""
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
    death = first.death or "died without a message"
    return _failure(first, "died", f"{death}, in {first.doing}{at}")


def _stuck(ranks: Sequence[Observed], timeout_s: float) -> bool:
    """Return whether a rank has been silent, and has kept the other ranks waiting, for `timeout_s`.

    Silence alone is not a failure: a phase such as the set-up or a save may take a long time on all ranks,
    and slightly longer on one. The rank that is behind all others waits for none of them. If no rank is
    behind, all ranks must be silent. Before the second step, torch may compile for that long on all ranks.
    Therefore, one of the ranks must also have waited at the same location for most of that time.
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
        # Ranks don't wait for each other during an evaluation, which may take a long time.
        return last.phase == "evaluate" and any(rank.position > last.position + _AHEAD for rank in ahead)
    unheard = any(rank.heard_s >= timeout_s for rank in alive)
    waits = any(rank.waited_s >= _WAITED * timeout_s for rank in alive)  # for a slow or stuck rank
    return (last.step > 1 or unheard or waits) and all(rank.is_late(timeout_s) for rank in alive)


def _first_that_waits(ranks: Sequence[Observed]) -> Failure:
    """Return the failure of the rank that the other ranks wait for, if no rank has ended by itself."""
    silent = [rank for rank in ranks if rank.status is None or rank.symptom]
    if unheard := [rank for rank in silent if rank.heard_s >= UNHEARD_S]:
        return _lost(unheard)
    if stopped := [rank for rank in silent if rank.state == "stopped"]:
        first = min(stopped, key=_progress)
        message = f"has been stopped (by SIGSTOP or a debugger) for {first.silent_s:.1f} s"
        return _failure(first, "stopped", f"{message}, in {first.doing}")
    quiet = [rank for rank in silent if not rank.symptom]  # the other ranks reported a communication error
    if quiet:
        behind = _may_block_others(quiet)
        if len(behind) == 1:
            return _hangs(behind[0])
    if quiet and len(quiet) < len(silent):
        return _hangs(min(quiet, key=_progress))
    return _unknown(ranks)


def _may_block_others(quiet: Sequence[Observed]) -> Sequence[Observed]:
    """Return the ranks that may keep the others waiting: those that are asleep, behind, or not waiting."""
    asleep = [rank for rank in quiet if rank.asleep_s >= ASLEEP_S]
    if asleep and len(asleep) < len(quiet):
        return asleep
    slowest = min(map(_progress, quiet))
    behind = [rank for rank in quiet if _progress(rank) == slowest]
    at_disk = [rank for rank in behind if rank.patience_s]
    busy = [rank for rank in behind if not rank.waits]
    return at_disk or busy or behind


def stand_still(ranks: Sequence[Observed], for_s: float) -> bool:
    """Return whether several ranks are working, and none has made progress for `for_s` seconds."""
    alive = [rank for rank in ranks if rank.status is None]
    return len(alive) > 1 and all(rank.silent_s >= for_s for rank in alive)


def slow(ranks: Sequence[Observed]) -> Observed | None:
    """Return the rank that all other ranks wait for, if none makes progress; None if unknown."""
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
    message = f"hangs in {rank.doing}, without progress for {rank.silent_s + rank.heard_s:.1f} s{at}"
    if rank.asleep_s >= ASLEEP_S:
        message += "; it holds the interpreter lock (GIL)"
    if rank.worker:
        message += f"; {rank.worker}"
    return _failure(rank, "hangs", message)


def _lost(unheard: Sequence[Observed]) -> Failure:
    first = min(unheard, key=lambda rank: rank.rank)
    hosts = sorted({(rank.host, rank.hostname) for rank in unheard})
    host_names = " and ".join(f"host {host} ({name})" for host, name in hosts)
    names = ", ".join(f"rank {rank.rank}" for rank in unheard)
    age = max(rank.heard_s for rank in unheard)
    message = (
        f"{host_names} with {names}: down or disconnected, no report for {age:.1f} s; "
        f"rank {first.rank} was last reported in {first.doing}"
    )
    return Failure(tuple(rank.rank for rank in unheard), "lost", 1, message, _facts(first))


def _unknown(ranks: Sequence[Observed]) -> Failure:
    """Return the failure to report if communication failed although every process seems to be alive."""
    reported = [rank for rank in ranks if rank.symptom] or list(ranks)
    first = max(reported, key=lambda rank: rank.ended_s or 0.0)
    message = f"cannot continue in {first.doing}: {first.error or 'all ranks are waiting'}"
    return _failure(
        first,
        "unknown",
        f"{message}; no process is dead, stopped or behind; ranks may be calling different collectives"
        f"{_locations(ranks)}",
    )


def _locations(ranks: Sequence[Observed]) -> str:
    """Describe the three source locations with the fewest ranks, each with its lowest rank."""
    locations: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.where:
            locations.setdefault(rank.where, []).append(rank.rank)
    rarest = sorted(locations.items(), key=lambda location: len(location[1]))[:3]
    texts = [
        f"rank {at[0]}{f' and {len(at) - 1} more' if len(at) > 1 else ''} at {location}"
        for location, at in rarest
    ]
    return ": " + ", ".join(texts) if texts else ""


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
