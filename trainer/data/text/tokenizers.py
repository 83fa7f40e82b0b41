"""Tokenizers for text datasets: raw bytes, GPT-2's byte-pair encoding, or a Hugging Face tokenizer."""

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
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocab_size: int
    end: np.ndarray
    """The tokens to append to each document."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, with U+FFFD for invalid UTF-8, such as incomplete characters."""


def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: bytes, gpt2, or a folder with a Hugging Face tokenizer.json."""
    if name not in NAMES:
        if not (file := Path(name) / TOKENIZER_FILES[0]).is_file():
            raise UserError(
                f"tokenizer={name}: expected one of {', '.join(NAMES)}, or a folder with {file.name}"
            )
        return HuggingFace(Path(name))
    return Bytes() if name == "bytes" else Gpt2()


class Bytes:
    """A tokenizer whose tokens are the bytes of the text; a newline ends a document."""

    vocab_size = 256
    end = np.frombuffer(b"\n", np.uint8)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Gpt2:
    """GPT-2's byte-pair encoding, as implemented by tiktoken.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self) -> None:
        tiktoken = optional("tiktoken", "the gpt2 tokenizer", extra="gpt2")
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # network libraries raise many kinds of errors
            raise UserError(
                f"failed to download the vocabulary of gpt2: {on_one_line(error)[:200]}; set "
                "TIKTOKEN_CACHE_DIR to a tiktoken cache folder that contains it, or pass a folder that "
                "contains Hugging Face's tokenizer.json for gpt2 as the tokenizer"
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
    """The tokenizer in a tokenizer.json, as implemented by the library `tokenizers`.

    A document ends with the ``eos_token`` in tokenizer_config.json or, without it, with a common end token.
    """

    def __init__(self, folder: Path) -> None:
        library = optional("tokenizers", f"the tokenizer {folder}")
        file, config = (folder / name for name in TOKENIZER_FILES)
        try:
            self._library = library.Tokenizer.from_file(str(file))
            eos_token = json.loads(config.read_text()).get("eos_token") if config.is_file() else None
        except Exception as error:  # `tokenizers` raises Exception itself
            raise UserError(f"{file} cannot be read: {on_one_line(error)}") from error
        self.vocab_size: int = self._library.get_vocab_size()
        eos_token = eos_token["content"] if isinstance(eos_token, dict) else eos_token
        names = [eos_token] if eos_token else _END_TOKENS
        known = [number for name in names if (number := self._library.token_to_id(name)) is not None]
        if not known:
            raise UserError(f"{folder} has no end-of-text token; set eos_token in its {config.name}")
        self.end = np.array(known[:1], np.uint32)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        encoded = self._library.encode_batch(decoded, add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._library.decode(list(tokens), skip_special_tokens=False)
