"""A verdict on a rank of another host waits for that host's next word: ours of ourselves is always newer."""

from collections.abc import Mapping

from trainer.faults.verdict import Verdict

# The first that comes may have been on its way already.
_REPORTS = 2


class Suspicion:
    """Whom the judge has in mind, and how many reports of each host had been read when it first did.

    What a host knows of itself is of this moment; a report, read when all was well or kept by a busy machine,
    may show a rank where it was a while ago: there it seems to hold up others that it has long served.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] | None = None
        self._counts: Mapping[int, int] = {}

    def drop(self) -> None:
        self._of = None

    def stands(self, verdict: Verdict, host: int, counts: Mapping[int, int]) -> bool:
        """Whether `verdict`, on a rank of `host`, has outlived two reports of it.

        Args:
            counts: how many reports have been read, by host; a host that is not there is this one.
        """
        if verdict.kind not in ("stopped", "hangs") or host not in counts:
            return True  # a fact, or seen with our own eyes
        of = (verdict.ranks, verdict.facts["phase"], verdict.facts["step"])
        if of != self._of:
            self._of, self._counts = of, dict(counts)
        return counts[host] >= self._counts[host] + _REPORTS
