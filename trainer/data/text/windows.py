"""Windows of tokens, which are adjacent in evaluation and randomly shifted in each training epoch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

from trainer.errors import UserError


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``block_size`` tokens, with the same windows shifted by one token as targets.

    Read by index, the windows of a text are adjacent. In training, each window is shifted by a random number
    of up to ``block_size - 1`` tokens, but not into validation windows. So an epoch reads almost the whole
    text once, with different boundaries in each epoch.

    Args:
        text: an array of more than ``block_size`` tokens, of an integer dtype; it may be memory-mapped.
        vocab_size: tokens must be from 0 to ``vocab_size - 1``.
        numbers: the indices of this dataset's windows; None uses all windows.
        border: the token that ends each document (see `mask_borders`).
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
        # An overlapping view with a row for each position. Tokens are read only when they are fetched.
        self._view = sliding_window_view(text, block_size + 1)
        num_windows = -(-len(self._view) // block_size)
        self.numbers = range(num_windows) if numbers is None else numbers
        is_rest = self.numbers.stop == num_windows
        # The last position at which a window may start.
        self._last = len(self._view) - 1 if is_rest else (self.numbers.stop - 1) * block_size

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._fetch(np.array([self.numbers[index] * self.block_size]))
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the batch (tokens (B, block_size), targets (B, block_size)), both int64."""
        return self._fetch(self._positions(indices))

    def draw(self, indices: Sequence[int], numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return a batch like ``__getitems__``, with each window shifted by its random number."""
        shifts = (numbers % np.uint64(self.block_size)).astype(np.int64)
        return self._fetch(np.minimum(self._positions(indices) + shifts, self._last))

    def _positions(self, indices: Sequence[int]) -> np.ndarray:
        return (np.asarray(indices) + self.numbers.start) * self.block_size

    def _fetch(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = self._view[positions].astype(np.int64)
        if rows.max() >= self.vocab_size:
            raise UserError(
                f"the data contains token {rows.max()}, but data.dataset.vocab_size={self.vocab_size} allows "
                f"0 to {self.vocab_size - 1}; set the vocabulary size of the tokenizer that created the data"
            )
        batch = torch.from_numpy(rows)
        return mask_borders(batch[:, :-1], batch[:, 1:], self.border)


def mask_borders(tokens: Tensor, targets: Tensor, border: int | None) -> tuple[Tensor, Tensor]:
    """Return tokens, and targets set to -100 where the token is ``border``, the last token of a document.

    The model needs its own argument ``border`` to prevent attention across documents.
    """
    return (tokens, targets) if border is None else (tokens, targets.masked_fill(tokens == border, -100))
