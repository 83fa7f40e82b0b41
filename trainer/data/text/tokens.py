"""Datasets of token files, which `python -m trainer.data.tokenize` and nanoGPT's prepare.py write."""

import json
from pathlib import Path

import numpy as np

from trainer.data.images import check_at_least_one, check_split
from trainer.data.text.tokenizers import TOKENIZER_FILES, Tokenizer
from trainer.data.text.tokenizers import tokenizer as tokenizer_named
from trainer.data.text.windows import Windows
from trainer.errors import UserError

FACTS = "tokens.json"
FILES = {"train": "train.bin", "eval": "val.bin"}


class Tokens(Windows):
    """Windows of ``block_size`` tokens of a memory-mapped file of any size.

    Args:
        split: train or eval.
        path: a folder with train.bin and val.bin, of uint16 or of the dtype in its tokens.json.
        block_size: number of tokens per window.
        vocab_size: size of the vocabulary; None reads it from tokens.json.
        eval_windows: number of windows of val.bin for an evaluation; None uses all of them.
        border: the token that ends each document (see `trainer.data.text.windows.mask_borders`): 50256 for
            gpt2, 10 for bytes. None treats all documents as one text.
    """

    def __init__(
        self,
        split: str,
        path: str,
        block_size: int = 1024,
        vocab_size: int | None = None,
        eval_windows: int | None = None,
        border: int | None = None,
    ) -> None:
        check_split(split)
        check_at_least_one(block_size=block_size, eval_windows=eval_windows)
        facts_file = Path(path) / FACTS
        facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
        size = vocab_size or facts.get("vocab_size")
        if size is None:
            raise UserError(
                f"{path} has no {FACTS} with the size of the vocabulary; set data.dataset.vocab_size (50257 "
                "for GPT-2)"
            )
        file = Path(path) / FILES[split]
        dtype = np.dtype(facts.get("dtype", "uint16"))
        if not file.is_file():
            raise UserError(
                f"{file} does not exist; create it with python -m trainer.data.tokenize TEXT {path}"
            )
        num_bytes = file.stat().st_size
        if num_bytes // dtype.itemsize <= block_size or num_bytes % dtype.itemsize:
            raise UserError(
                f"{file} has {num_bytes} bytes, but must contain a whole number of "
                f"{dtype.itemsize}-byte tokens, more than data.dataset.block_size={block_size}"
            )
        super().__init__(np.memmap(file, dtype, mode="r"), block_size, size, border=border)
        self._tokenizer_name = facts.get("tokenizer")
        if self._tokenizer_name == TOKENIZER_FILES[0]:
            self._tokenizer_name = path
        if split == "eval" and eval_windows is not None:
            self.numbers = self.numbers[:eval_windows]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of these tokens; None without a tokens.json."""
        name = self._tokenizer_name
        return None if name is None else tokenizer_named(name)
