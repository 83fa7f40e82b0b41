"""From text to tokens and back: raw bytes, or GPT-2's byte-pair encoding.

A text dataset has its tokenizer as the attribute ``tokenizer``.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.errors import UserError, on_one_line

NAMES = ("bytes", "gpt2")


class Tokenizer(Protocol):
    vocab_size: int
    end: np.ndarray
    """The tokens that follow each document."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Bytes of UTF-8, not text: a token may end in the middle of a character."""


def tokenizer(name: str, vocabulary: str | Path | None = None) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        vocabulary: of gpt2, if it cannot be downloaded: a file r50k_base.tiktoken, or a folder with vocab.bpe
            and encoder.json, or with merges.txt and vocab.json.

    Raises:
        UserError: the name is unknown, tiktoken is not installed, or the vocabulary is missing.
    """
    if name not in NAMES:
        raise UserError(f"tokenizer is {name}, but must be one of {', '.join(NAMES)}")
    if name == "bytes":
        if vocabulary is not None:
            raise UserError(f"vocabulary={vocabulary} is for tokenizer=gpt2; tokenizer=bytes takes none")
        return Bytes()
    return Gpt2(vocabulary)


class Bytes:
    vocab_size = 256
    end = np.frombuffer(b"\n", np.uint8)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


class Gpt2:
    """A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, through tiktoken."""

    def __init__(self, vocabulary: str | Path | None) -> None:
        try:
            import tiktoken
            from tiktoken_ext.openai_public import r50k_pat_str
        except ImportError:
            raise UserError(
                "the gpt2 tokenizer needs tiktoken: pip install 'ringmaster-trainer[gpt2]'"
            ) from None
        if vocabulary is None:
            try:
                self._encoding = tiktoken.get_encoding("gpt2")
            except Exception as error:  # network libraries raise their own
                raise UserError(
                    f"the vocabulary of gpt2 cannot be downloaded: {on_one_line(error)[:200]}; set "
                    "vocabulary to r50k_base.tiktoken, or to a folder with vocab.bpe and encoder.json"
                ) from error
        else:
            ranks = _ranks(Path(vocabulary))
            special = {"<|endoftext|>": len(ranks)}
            self._encoding = tiktoken.Encoding(
                "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
            )
        self.vocab_size = self._encoding.n_vocab
        self.end = np.array([self._encoding.eot_token], np.uint32)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        threads = min(len(texts), len(os.sched_getaffinity(0)))
        encoded = self._encoding.encode_ordinary_batch(decoded, num_threads=threads)
        return [np.array(tokens, np.uint32) for tokens in encoded]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self._encoding.decode_bytes(list(tokens))


def _ranks(vocabulary: Path) -> dict[bytes, int]:
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks, load_tiktoken_bpe

    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else tiktoken caches local files, keyed by name alone
    try:
        if not vocabulary.is_dir():
            return load_tiktoken_bpe(str(vocabulary))
        for merges, encoder in (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json")):
            if (vocabulary / merges).is_file():
                return data_gym_to_mergeable_bpe_ranks(str(vocabulary / merges), str(vocabulary / encoder))
    except (OSError, ValueError, AssertionError, KeyError) as error:
        raise UserError(f"vocabulary={vocabulary} is not a vocabulary of gpt2: {error}") from error
    raise UserError(f"vocabulary={vocabulary} must contain vocab.bpe or merges.txt")
