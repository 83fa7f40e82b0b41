"""Which parts of a model a check reads in a pass, where reading all would cost too much."""

import random
from collections.abc import Sequence

_PASSES_OF_ALL = 3


class Turns:
    """Draws the parts: in a fixed order, what changes in every fourth pass might never be read.

    All come in the first passes; later one at a time, each once in a round, at a random place of it. Ranks
    that ask equally often get the same.

    Args:
        interval: the mean number of passes for one part.
    """

    def __init__(self, num_parts: int, interval: int = 1) -> None:
        self._num_parts, self._interval = num_parts, interval
        self._num_asked, self._random, self._round = 0, random.Random(0), list[int]()

    def next(self) -> Sequence[int]:
        """The numbers of the parts to read in the next pass."""
        self._num_asked += 1
        if self._num_asked <= _PASSES_OF_ALL or not self._num_parts:
            return range(self._num_parts)
        if not self._round:
            self._round = list(range(self._num_parts * self._interval))
            self._random.shuffle(self._round)
        drawn = self._round.pop()
        return [drawn] if drawn < self._num_parts else []
