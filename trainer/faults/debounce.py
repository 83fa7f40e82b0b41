"""A rank of another host is blamed only after two more reports of it, which are older than local facts."""

from collections.abc import Hashable, Mapping

# The first that arrives may have been sent before.
_REPORTS = 2


class Debounce:
    """A suspect, and the number of reports of each host at the first suspicion.

    Facts about this host are current. A report, read when all was well or delayed by a busy machine,
    may show where a rank was a while ago: it then seems to block others that it has long since served.
    """

    def __init__(self) -> None:
        self._of: Hashable | None = None
        self._counts: Mapping[int, int] = {}

    def clear(self) -> None:
        self._of = None

    def confirmed(self, of: Hashable, host: int, counts: Mapping[int, int]) -> bool:
        """Whether the suspicion of a rank of `host` has outlived two further reports of that host.

        Args:
            of: the suspect, and where it is.
            counts: the number of reports read, by host; a host without an entry is this one.
        """
        if host not in counts:
            return True  # on this host: observed directly
        if of != self._of:
            self._of, self._counts = of, dict(counts)
        return counts[host] >= self._counts[host] + _REPORTS
