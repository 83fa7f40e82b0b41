"""Text as bytes: a file, a folder of files, or the language reference inside every CPython."""

from pathlib import Path

import numpy as np

from trainer.data.images import check_at_least_one, check_split
from trainer.data.text.tokenizers import Bytes
from trainer.data.text.windows import Windows
from trainer.errors import UserError


class Text(Windows):
    """Windows of ``block_size`` bytes; the last ``eval_fraction`` of them are held out.

    Vocabulary: the 256 bytes.

    Args:
        path: a file of any size, or a folder whose files are all held in memory, sorted by name, sub-folders
            too. None: ``pydoc_data.topics`` of the running Python, about half a megabyte.
        border: the byte that ends each document (see `trainer.data.text.windows.kept_apart`).

    Raises:
        UserError: ``path`` does not exist, an argument is out of range, or the text is too short for one
            window in each split.
    """

    tokenizer = Bytes()
    vocab_size = tokenizer.vocab_size

    def __init__(
        self,
        split: str,
        path: str | None = None,
        block_size: int = 128,
        eval_fraction: float = 0.1,
        border: int | None = None,
    ) -> None:
        check_split(split)
        check_at_least_one(block_size=block_size)
        if not 0 < eval_fraction < 1:
            raise UserError(f"data.dataset.eval_fraction={eval_fraction} is not between 0 and 1")
        text = python_reference() if path is None else read_text(Path(path))
        num_windows = max(0, len(text) - 1) // block_size
        num_eval = round(num_windows * eval_fraction)
        if not 0 < num_eval < num_windows:
            raise UserError(
                f"the text at {path or 'pydoc_data.topics'} has {len(text)} bytes, too few to "
                f"train and evaluate on windows of data.dataset.block_size={block_size} with "
                f"data.dataset.eval_fraction={eval_fraction}; lower the block size"
            )
        held_out = num_windows - num_eval
        numbers = range(held_out, num_windows) if split == "eval" else range(held_out)
        super().__init__(text, block_size, vocab_size=256, numbers=numbers, border=border)


def python_reference() -> np.ndarray:
    from pydoc_data.topics import topics  # a module that is one dictionary literal

    return np.frombuffer("\n\n".join(topics.values()).encode(), dtype=np.uint8)


def read_text(path: Path) -> np.ndarray:
    """The bytes at ``path``: a file is mapped, the files of a folder are read."""
    if not path.exists():
        raise UserError(f"data.dataset.path={path} does not exist")
    if path.is_file() and path.stat().st_size:
        return np.memmap(path, dtype=np.uint8, mode="r")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return np.concatenate([np.empty(0, np.uint8), *(np.fromfile(file, np.uint8) for file in files)])
