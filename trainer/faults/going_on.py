"""distributed.shrink at a verdict: which ranks go on without the others, and how those of a host begin to."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainer.errors import UserError
from trainer.faults.fault_save import FaultSave
from trainer.faults.neighbour import Neighbour
from trainer.faults.processes import EXITED
from trainer.faults.verdict import UNHEARD_S, Observed, Verdict, takes_part

_DEAD_S = 5.0  # for the others of this host to be dead


def who_goes_on(ranks: Sequence[Observed], verdict: Verdict, by_host: bool) -> tuple[int, ...]:
    """The ranks that can go on without those that the verdict is about, and without any other that is gone.

    None after an exception of user code or an exit, which may come again; in the set-up; or at the end.
    Behind a cut link, each side takes the other for lost: only the larger goes on, or of halves that with
    rank 0.

    Args:
        by_host: whether the launcher of a host ends its other ranks when one dies.
    """
    gone = [rank for rank in ranks if rank.rank in verdict.ranks or not takes_part(rank)]
    hosts = {rank.host for rank in gone} if by_host else set()
    able = [rank for rank in ranks if rank not in gone and rank.host not in hosts]
    if verdict.kind not in ("died", "stopped", "hangs", "lost") or not able:
        return ()
    if any(EXITED in (rank.death or "") for rank in gone):
        return ()
    if any(not rank.step or rank.phase == "end" for rank in able):
        return ()
    more = 2 * len(able) - len(ranks) + (ranks[0] in able) / 2
    if more <= 0 and any(rank.heard_s >= UNHEARD_S for rank in gone):
        return ()
    return tuple(rank.rank for rank in able)


class GoingOn:
    """This rank's part in going on without others.

    Args:
        here: the ranks of this host, this one among them.
        by_host: whether the launcher of a host ends its other ranks when one dies.

    Attributes:
        ranks: those that go on, this one among them, once that is decided.
    """

    def __init__(self, rank: int, here: Mapping[int, Neighbour], save: FaultSave, by_host: bool) -> None:
        self._rank, self._here, self._save, self._by_host = rank, here, save, by_host
        self.ranks: tuple[int, ...] = ()
        self._cut: Callable[[], None] | None = None
        self._check_shares: Callable[[int], object] = lambda num_ranks: None

    def allow(self, cut: Callable[[], None], check_shares: Callable[[int], object]) -> None:
        """Let ranks go on without others; without this call, none does.

        Args:
            cut: ends all waits of this process for other ranks.
            check_shares: raises UserError if a batch can't be divided among a number of ranks.
        """
        self._cut, self._check_shares = cut, check_shares

    def decided(self, verdict: Verdict, everyone: Sequence[Observed]) -> Verdict:
        """The verdict with the ranks that go on, or with a reason why none does."""
        if self._cut is None:
            return verdict
        ranks = who_goes_on(everyone, verdict, self._by_host)
        try:
            self._check_shares(len(ranks) or 1)
        except UserError as error:
            return replace(verdict, going_on=()).followed_by(f"the others cannot go on: {error}")
        return replace(verdict, going_on=ranks)

    def begin(self, ranks: Sequence[int], wait: Callable[[float], None]) -> None:
        """Go on with `ranks`, or exit if this is none of them; `wait` waits for a number of seconds."""
        if self._rank not in ranks:  # not by an exit, after which launch=local would end the others, too
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + _DEAD_S
        for neighbour in [each for rank, each in self._here.items() if rank not in ranks]:
            while not neighbour.look_for_death() and time.monotonic() < deadline:
                wait(0.01)  # rank 0 has the lock of run_dir
        self.ranks = tuple(ranks)
        if self._save.last_step is not None:
            self._save.last_step.thaw()
        assert self._cut is not None
        self._cut()
