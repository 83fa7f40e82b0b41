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

    By index, they are windows ``numbers`` of the adjacent windows of the text. Drawn, each begins up to
    ``block_size - 1`` tokens later, without held-out windows: an epoch reads all of the text about once, but
    at other boundaries each time.

    Args:
        text: an array of an integer dtype, of more than ``block_size`` tokens; it may be a mapped file.
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        numbers: of the windows; None: all.
        border: the token that ends each document (see `kept_apart`).
    """

    def __init__(
        self,
        text: np.ndarray,
        block_size: int,
        vocab_size: int,
        numbers: range | None = None,
        border: int | None = None,
    ) -> None:
        self.block_size, self.vocab_size, self.border = block_size, vocab_size, border
        # An overlapping view, a row for each position: a token is read only when it is fetched.
        self._view = sliding_window_view(text, block_size + 1)
        num_windows = -(-len(self._view) // block_size)
        self.numbers = range(num_windows) if numbers is None else numbers
        is_rest = self.numbers.stop == num_windows
        # The last position at which a window may begin.
        self._last = len(self._view) - 1 if is_rest else (self.numbers.stop - 1) * block_size

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._fetch(np.array([self.numbers[index] * self.block_size]))
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch (tokens (B, block_size), targets (B, block_size)), both int64."""
        return self._fetch(self._positions(indices))

    def draw(self, indices: Sequence[int], numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """As ``__getitems__``, each window shifted by its random number."""
        shifts = (numbers % np.uint64(self.block_size)).astype(np.int64)
        return self._fetch(np.minimum(self._positions(indices) + shifts, self._last))

    def _positions(self, indices: Sequence[int]) -> np.ndarray:
        return (np.asarray(indices) + self.numbers.start) * self.block_size

    def _fetch(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = self._view[positions].astype(np.int64)
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
