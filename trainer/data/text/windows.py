"""Windows of tokens: adjacent for evaluation, drawn at random each epoch for training."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import UserError


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``block_size`` tokens, with the same windows one token later as targets.

    By index, they are windows ``numbers`` of the adjacent windows of the texts. Drawn, each begins up
    to ``block_size - 1`` tokens later, as far as its text goes and without held-out windows: an
    epoch reads all of the text about once, but at other boundaries each time.

    Args:
        texts: arrays of an integer dtype, mapped files or not; no window spans two texts.
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        numbers: of the windows; None: all.
        border: the token that ends each document (see `kept_apart`).
    """

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        block_size: int,
        vocab_size: int,
        numbers: range | None = None,
        border: int | None = None,
    ) -> None:
        self.block_size, self.vocab_size, self.border = block_size, vocab_size, border
        # Overlapping views, a row for each position: a token is read only when it is fetched.
        self._views = [sliding_window_view(text, block_size + 1) for text in texts if len(text) > block_size]
        num_windows = [-(-len(view) // block_size) for view in self._views]
        self._starts = np.cumsum([0, *num_windows])  # the window at which each text begins
        self.numbers = range(int(self._starts[-1])) if numbers is None else numbers
        # The last position of each text at which a window may begin.
        self._lasts = np.array([len(view) - 1 for view in self._views])
        if self.numbers.stop < self._starts[-1]:
            which, position = self._places(np.array([self.numbers.stop - 1]))
            self._lasts[which] = position

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._fetch(*self._places(np.array([self.numbers[index]])))
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch (tokens (B, block_size), targets (B, block_size)), both int64."""
        return self._fetch(*self._places(np.asarray(indices) + self.numbers.start))

    def draw(self, indices: Sequence[int], numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """As ``__getitems__``, each window shifted by its random number."""
        which, positions = self._places(np.asarray(indices) + self.numbers.start)
        positions = positions + (numbers % np.uint64(self.block_size)).astype(np.int64)
        return self._fetch(which, np.minimum(positions, self._lasts[which]))

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text of each window, and its position there."""
        which = self._starts.searchsorted(numbers, side="right") - 1
        return which, (numbers - self._starts[which]) * self.block_size

    def _fetch(self, which: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = np.empty((len(which), self.block_size + 1), dtype=np.int64)
        for text in np.unique(which):
            chosen = which == text
            rows[chosen] = self._views[text][positions[chosen]]
        if rows.max() >= self.vocab_size:
            raise UserError(
                f"the data contains token {rows.max()}, but data.dataset.vocab_size={self.vocab_size} allows "
                f"0 to {self.vocab_size - 1}; set the size of the vocabulary that the data was made with"
            )
        batch = torch.from_numpy(rows)
        return kept_apart(batch[:, :-1], batch[:, 1:], self.border)


def kept_apart(tokens: Tensor, targets: Tensor, border: int | None) -> tuple[Tensor, Tensor]:
    """Tokens and targets; the last token of a document, ``border``, predicts none: its target is -100.

    A window's first document may have begun before it, and its last may go on after it: each part is trained
    as a document of its own. A model that keeps them apart in its attention has an argument ``border``, too.
    """
    return (tokens, targets) if border is None else (tokens, targets.masked_fill(tokens == border, -100))
