"""From text to tokens and back: raw bytes, GPT-2's byte-pair encoding, or a tokenizer of Hugging Face.

A text dataset has its tokenizer as the attribute ``tokenizer``.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.errors import UserError, on_one_line, optional

NAMES = ("bytes", "gpt2")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    vocab_size: int
    end: np.ndarray
    """The tokens that follow each document."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, with U+FFFD for what is not UTF-8, such as a character cut in two."""


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name, or of a folder of Hugging Face's with a tokenizer.json.

    Raises:
        UserError: the name is unknown, tiktoken is not installed, or its vocabulary cannot be downloaded.
    """
    if name not in NAMES:
        if not (file := Path(name) / TOKENIZER_FILES[0]).is_file():
            raise UserError(
                f"tokenizer is {name}, but must be one of {', '.join(NAMES)}, or a folder with {file.name}"
            )
        return HuggingFace(Path(name))
    return Bytes() if name == "bytes" else Gpt2()


class Bytes:
    vocab_size = 256
    end = np.frombuffer(b"\n", np.uint8)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Gpt2:
    """A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, through tiktoken."""

    def __init__(self) -> None:
        tiktoken = optional("tiktoken", "the gpt2 tokenizer", extra="gpt2")
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # network libraries raise their own
            raise UserError(
                f"the vocabulary of gpt2 cannot be downloaded: {on_one_line(error)[:200]}; set "
                "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has it, or give a folder of Hugging Face's "
                "with gpt2's tokenizer.json"
            ) from error
        self.vocab_size = self._encoding.n_vocab
        self.end = np.array([self._encoding.eot_token], np.uint32)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        threads = min(len(texts), len(os.sched_getaffinity(0)) if sys.platform == "linux" else 8)
        encoded = self._encoding.encode_ordinary_batch(decoded, num_threads=threads)
        return [np.array(tokens, np.uint32) for tokens in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))


class HuggingFace:
    """A tokenizer.json, through the library `tokenizers`.

    A document ends with the ``eos_token`` of the tokenizer_config.json beside it or, without one, with the
    first known name of such a token.
    """

    def __init__(self, folder: Path) -> None:
        library = optional("tokenizers", f"the tokenizer {folder}")
        file, beside = (folder / name for name in TOKENIZER_FILES)
        try:
            self._library = library.Tokenizer.from_file(str(file))
            named = json.loads(beside.read_text()).get("eos_token") if beside.is_file() else None
        except Exception as error:  # the library raises plain ones
            raise UserError(f"{file} cannot be read: {on_one_line(error)}") from error
        self.vocab_size: int = self._library.get_vocab_size()
        names = [named["content"] if isinstance(named, dict) else named] if named else _ENDS
        known = [number for name in names if (number := self._library.token_to_id(name)) is not None]
        if not known:
            raise UserError(f"{folder} has no token for the end of a text; set eos_token in {beside.name}")
        self.end = np.array(known[:1], np.uint32)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        encoded = self._library.encode_batch(decoded, add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._library.decode(list(tokens), skip_special_tokens=False)
