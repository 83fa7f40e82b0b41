"""Datasets of text as bytes, from a file, a folder of files, or the language reference in CPython."""

from pathlib import Path

import numpy as np

from trainer.data.images import check_at_least_one, check_split
from trainer.data.text.tokenizers import Bytes
from trainer.data.text.windows import Windows
from trainer.errors import UserError


class Text(Windows):
    """Windows of ``block_size`` bytes of a text. The vocabulary is the 256 byte values.

    Args:
        split: train, or eval for the windows at the end of the text.
        path: a file of any size, or a folder whose files, including those in sub-folders, are read into
            memory in the order of their names. None uses ``pydoc_data.topics`` of Python, about half a
            megabyte.
        block_size: number of bytes per window.
        eval_fraction: fraction of the windows that are used for validation.
        border: the byte that ends each document (see `trainer.data.text.windows.mask_borders`).
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
            raise UserError(f"data.dataset.eval_fraction={eval_fraction}: expected a number between 0 and 1")
        text = python_reference() if path is None else read_text(Path(path))
        num_windows = max(0, len(text) - 1) // block_size
        num_eval = round(num_windows * eval_fraction)
        if not 0 < num_eval < num_windows:
            raise UserError(
                f"the text at {path or 'pydoc_data.topics'} has {len(text)} bytes, too few for a training "
                f"and an evaluation window with data.dataset.block_size={block_size} and "
                f"data.dataset.eval_fraction={eval_fraction}; set a smaller block_size, or use more text"
            )
        held_out = num_windows - num_eval
        numbers = range(held_out, num_windows) if split == "eval" else range(held_out)
        super().__init__(text, block_size, vocab_size=256, numbers=numbers, border=border)


def python_reference() -> np.ndarray:
    """Return the bytes of Python's language reference."""
    from pydoc_data.topics import topics  # a module that is one dictionary literal

    return np.frombuffer("\n\n".join(topics.values()).encode(), dtype=np.uint8)


def read_text(path: Path) -> np.ndarray:
    """Return the bytes at ``path``: a file is memory-mapped, the files of a folder are read."""
    if not path.exists():
        raise UserError(f"data.dataset.path={path} does not exist")
    if path.is_file() and path.stat().st_size:
        return np.memmap(path, dtype=np.uint8, mode="r")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return np.concatenate([np.empty(0, np.uint8), *(np.fromfile(file, np.uint8) for file in files)])
