"""A rank of another host is named after that host's next word: what we know of ourselves is always newer."""

from collections.abc import Hashable, Mapping

# The first that comes may have been on its way already.
_REPORTS = 2


class Debounce:
    """Whom we have in mind, and how many reports of each host had been read when we first did.

    What a host knows of itself is of this moment; a report, read when all was well or kept by a busy machine,
    may show a rank where it was a while ago: there it seems to hold up others that it has long served.
    """

    def __init__(self) -> None:
        self._of: Hashable | None = None
        self._counts: Mapping[int, int] = {}

    def clear(self) -> None:
        self._of = None

    def confirmed(self, of: Hashable, host: int, counts: Mapping[int, int]) -> bool:
        """Whether what is held against a rank of `host`, and where it is, has outlived two reports of it.

        Args:
            of: who it is, and where.
            counts: how many reports have been read, by host; a host that is not there is this one.
        """
        if host not in counts:
            return True  # seen with our own eyes
        if of != self._of:
            self._of, self._counts = of, dict(counts)
        return counts[host] >= self._counts[host] + _REPORTS
