"""Text of any size as a stream of windows, in little memory."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainer.data.images import check_at_least_one, check_fraction, check_split
from trainer.data.text.files import TextChunk, TextFiles
from trainer.data.text.tokenizers import tokenizer as tokenizer_named
from trainer.data.text.windows import kept_apart


class TextStream(IterableDataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of ``block_size`` tokens, with the same windows one token later as targets.

    The last ``eval_fraction`` of the bytes is held out, and ``eval_windows`` windows of it evaluated on. Read
    in shards (``data.sharded``), equal parts of the bytes, each batch comes from many places in the text. The
    windows of each epoch begin at other positions than those of the epoch before.

    Args:
        path: a file or folder of text or JSON lines, as for ``TextFiles``.
        border: the token that ends each document, 10 of bytes and 50256 of gpt2 (see
            `trainer.data.text.windows.kept_apart`).
        tokenizer: bytes | gpt2; ``vocabulary`` as for ``trainer.data.text.tokenizers.tokenizer``.

    Raises:
        UserError: ``path`` holds no text, or an argument is out of range.
    """

    draws = False

    def __init__(
        self,
        split: str,
        path: str,
        block_size: int = 128,
        tokenizer: str = "bytes",
        vocabulary: str | None = None,
        field: str = "text",
        eval_fraction: float = 0.01,
        eval_windows: int = 1000,
        num_shards: int = 16,
        border: int | None = None,
    ) -> None:
        check_split(split)
        check_at_least_one(block_size=block_size, eval_windows=eval_windows, num_shards=num_shards)
        check_fraction(eval_fraction)
        self.block_size, self.num_shards, self.border = block_size, num_shards, border
        self._texts, self.tokenizer = TextFiles(path, field), tokenizer_named(tokenizer, vocabulary)
        self.vocab_size = self.tokenizer.vocab_size
        num_train = self._texts.num_bytes - round(self._texts.num_bytes * eval_fraction)
        self._begin, self._end = (num_train, self._texts.num_bytes) if split == "eval" else (0, num_train)
        self._max_windows = eval_windows if split == "eval" else None
        self._first_token = 0  # of the epoch's first window
        self._start: dict[str, int] | None = None  # the state to resume from
        self._window = _Buffer(np.empty(0, np.uint8), [])

    def set_epoch(self, epoch: int) -> None:
        self._first_token = int(epoch * 0.6180339887 % 1 * self.block_size)  # the golden ratio: no repeats

    def shard(self, num_shards: int, index: int) -> "TextStream":
        part, length = copy.copy(self), self._end - self._begin
        part._begin = self._begin + length * index // num_shards
        part._end = self._begin + length * (index + 1) // num_shards
        return part

    def state_dict(self) -> dict[str, Any]:
        if self._start is not None:
            return dict(self._start)
        return self._window.state() if self._window.origins else {"begin": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = None if "begin" in state else state
        self._window = _Buffer(np.empty(0, np.uint8), [])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self._start, size = self._start, None, self.block_size
        if start is None:
            chunks, skip = self._texts.chunks(self._begin, self._end), self._first_token
        else:
            chunks, skip = self._texts.chunks_from(start["file"], start["offset"], self._end), start["tokens"]
        num_windows = 0
        buffer = self._window = _Buffer(np.empty(0, np.uint8), [])
        for chunk in chunks:
            buffer.add(chunk, self._tokens(chunk), skip)
            skip = 0
            while buffer.num_left > size:
                window = torch.from_numpy(buffer.take(size + 1, size).astype(np.int64))
                num_windows += 1
                yield kept_apart(window[:-1], window[1:], self.border)
                if num_windows == self._max_windows:
                    return

    def _tokens(self, chunk: TextChunk) -> np.ndarray:
        [tokens] = self.tokenizer.encode([chunk.text])
        return np.concatenate([tokens, self.tokenizer.end]) if chunk.ends_document else tokens


class _Buffer:
    """Tokens read but not yet returned, and the chunks they come from.

    Attributes:
        origins: for each chunk, its first position in ``tokens``, its file and its offset.
    """

    def __init__(self, tokens: np.ndarray, origins: list[tuple[int, int, int]]) -> None:
        self.tokens, self.origins, self.position = tokens, origins, 0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.position

    def add(self, chunk: TextChunk, tokens: np.ndarray, skip: int) -> None:
        rest = self.tokens[self.position :]
        kept = [origin for origin in self.origins if origin[0] >= self.position]
        before = [origin for origin in self.origins if origin[0] < self.position][-1:]
        self.origins = [(at - self.position, file, offset) for at, file, offset in before + kept]
        self.origins.append((len(rest), chunk.file, chunk.offset))
        self.tokens, self.position = np.concatenate([rest, tokens]), min(skip, len(rest) + len(tokens))

    def take(self, length: int, step: int) -> np.ndarray:
        taken = self.tokens[self.position : self.position + length]
        self.position += step
        return taken

    def state(self) -> dict[str, int]:
        """The chunk of the next token, and how many tokens of the chunk come before it."""
        at, file, offset = max(origin for origin in self.origins if origin[0] <= self.position)
        return {"file": file, "offset": offset, "tokens": self.position - at}
