"""Text as bytes: a file, a folder of files, or the language reference inside every CPython."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.images import check_split
from trainer.errors import UserError

MAPPED_BYTES = 64 * 2**20  # a file from this size on is mapped into memory, not read


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``block_size`` bytes and, one byte further on, what is to be predicted.

    The windows lie side by side; the last ``eval_fraction`` of them are held out. Vocabulary: the 256 bytes.

    Args:
        path: a file, or a folder whose files are all read, in the order of their names, sub-folders too.
            None: ``pydoc_data.topics`` of the running Python, about half a megabyte.

    Raises:
        UserError: nothing at ``path``, an argument out of range, or a text too short for one window in
            each split.
    """

    vocab_size = 256

    def __init__(
        self, split: str, path: str | None = None, block_size: int = 128, eval_fraction: float = 0.1
    ) -> None:
        check_split(split)
        if block_size < 1:
            raise UserError(f"data.dataset.block_size={block_size} is not at least 1")
        if not 0 < eval_fraction < 1:
            raise UserError(f"data.dataset.eval_fraction={eval_fraction} is not between 0 and 1")
        self.block_size = block_size
        texts = [python_reference()] if path is None else list(read_texts(Path(path)))
        # Overlapping views, a row for each window: no byte is read before it is fetched.
        self._windows = [
            sliding_window_view(text, block_size + 1)[::block_size]
            for text in texts
            if len(text) > block_size
        ]
        self._starts = np.cumsum([0, *map(len, self._windows)])  # the window at which each text begins
        num_windows = int(self._starts[-1])
        num_eval = round(num_windows * eval_fraction)
        if not 0 < num_eval < num_windows:
            raise UserError(
                f"the text at {path or 'pydoc_data.topics'} has {sum(map(len, texts))} bytes, too few to "
                f"train and evaluate on windows of data.dataset.block_size={block_size} with "
                f"data.dataset.eval_fraction={eval_fraction}; lower the block size"
            )
        held_out = num_windows - num_eval
        self._numbers = range(held_out, num_windows) if split == "eval" else range(held_out)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._fetch(np.array([self._numbers[index]]))
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch (tokens (B, block_size), targets (B, block_size)), both int64."""
        return self._fetch(np.asarray(indices) + self._numbers.start)

    def _fetch(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = np.empty((len(numbers), self.block_size + 1), dtype=np.uint8)
        which = self._starts.searchsorted(numbers, side="right") - 1
        for text in np.unique(which):
            chosen = which == text
            rows[chosen] = self._windows[text][numbers[chosen] - self._starts[text]]
        batch = torch.from_numpy(rows)
        return batch[:, :-1].long(), batch[:, 1:].long()


def python_reference() -> np.ndarray:
    from pydoc_data.topics import topics  # a module that is one dictionary literal

    return np.frombuffer("\n\n".join(topics.values()).encode(), dtype=np.uint8)


def read_texts(path: Path) -> Iterator[np.ndarray]:
    """The bytes at ``path``: large files mapped one by one, each run of small ones between them joined."""
    if not path.exists():
        raise UserError(f"data.dataset.path={path} does not exist")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    small: list[np.ndarray] = []
    for file in files:
        if file.stat().st_size < MAPPED_BYTES:
            small.append(np.fromfile(file, dtype=np.uint8))
            continue
        if small:
            yield np.concatenate(small)
            small = []
        yield np.memmap(file, dtype=np.uint8, mode="r")
    if small:
        yield np.concatenate(small)
