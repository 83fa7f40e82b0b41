"""Converts text to token files: ``python -m trainer.data.tokenize PATH OUT --tokenizer bytes|gpt2|FOLDER``.

PATH is a file or a folder of text or .jsonl. OUT becomes a folder with train.bin and val.bin, of uint16
or uint32, and tokens.json, which describes them; data=tokens and nanoGPT train on it. FOLDER is one of
Hugging Face's with a tokenizer.json, which OUT gets, too.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from trainer.data.text.files import TextChunk, TextFiles
from trainer.data.text.tokenizers import NAMES, TOKENIZER_FILES, Tokenizer, tokenizer
from trainer.data.text.tokens import FACTS, FILES
from trainer.errors import UserError

CHUNKS_AT_ONCE = 64  # encoded in parallel on all cores: 8 MiB of text


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a mistake, after one message."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data.tokenize", description=__doc__)
    parser.add_argument(
        "path", type=Path, help="a file, or a folder of files, of text or JSON lines (.jsonl)"
    )
    parser.add_argument("out", type=Path, help="the folder to write; must not exist")
    parser.add_argument("--tokenizer", default="gpt2", metavar="bytes|gpt2|FOLDER")
    parser.add_argument("--field", default="text", help="the key of the text in JSON lines (text)")
    parser.add_argument("--eval-fraction", type=float, default=0.005, help="of the bytes, held out (0.005)")
    chosen = parser.parse_args(arguments)
    try:
        facts = tokenize(
            TextFiles(chosen.path, chosen.field),
            chosen.out,
            tokenizer(chosen.tokenizer),
            chosen.tokenizer,
            chosen.eval_fraction,
        )
    except KeyboardInterrupt:
        print(f"interrupted; {chosen.out} was not written", file=sys.stderr)
        return 130
    except UserError as error:
        print(error, file=sys.stderr)
        return UserError.exit_code
    except OSError as error:
        print(f"{chosen.out} cannot be written: {error}", file=sys.stderr)
        return UserError.exit_code
    print(
        f"{chosen.out}: {facts['train']:,} tokens to train on, {facts['eval']:,} held out, {facts['dtype']}; "
        f"data.task.bytes_per_token={facts['bytes_per_token']} gives bits_per_byte"
    )
    return 0


def tokenize(
    texts: TextFiles, out: Path, by: Tokenizer, name: str, eval_fraction: float
) -> dict[str, int | float | str]:
    """Write the folder ``out``, or nothing; return the contents of its tokens.json.

    Raises:
        UserError: ``out`` exists, or the text is missing, or too short to hold out the fraction.
        OSError: ``out`` cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists; remove it, or choose another")
    if not 0 < eval_fraction < 1:
        raise UserError(f"--eval-fraction is {eval_fraction}, but must be between 0 and 1")
    part = out.with_name(f"{out.name}.part{os.getpid()}")
    dtype = np.dtype(np.uint16 if by.vocab_size <= 2**16 else np.uint32)
    num_train = texts.num_bytes - round(texts.num_bytes * eval_fraction)
    part.mkdir(parents=True)
    try:
        with tqdm(total=texts.num_bytes, unit="B", unit_scale=True, mininterval=0.5, desc=str(out)) as bar:
            of_splits = itertools.groupby(
                texts.chunks(num_train), lambda chunk: "train" if chunk.begin < num_train else "eval"
            )
            written = {
                split: _write(part / FILES[split], chunks, by, dtype, bar) for split, chunks in of_splits
            }
        counts = {split: written.get(split, (0, 0))[0] for split in FILES}
        for split, count in counts.items():
            if not count:
                raise UserError(
                    f"of {texts.num_bytes:,} bytes, --eval-fraction={eval_fraction} leaves no text for "
                    f"{split}; change it, or check the files"
                )
        facts: dict[str, int | float | str] = {
            "tokenizer": name if name in NAMES else TOKENIZER_FILES[0],
            "vocab_size": by.vocab_size,
            "dtype": dtype.name,
            **counts,
            "bytes_per_token": round(sum(size for _, size in written.values()) / sum(counts.values()), 4),
        }
        for beside in TOKENIZER_FILES if name not in NAMES else ():
            if (Path(name) / beside).is_file():
                shutil.copyfile(Path(name) / beside, part / beside)
        (part / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return facts


def _write(
    path: Path, chunks: Iterator[TextChunk], by: Tokenizer, dtype: np.dtype, bar: "tqdm[None]"
) -> tuple[int, int]:
    """Return the number of tokens, and of the bytes of text that they encode."""
    count = num_bytes = 0
    with path.open("wb") as file:
        while some := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
            for chunk, tokens in zip(some, by.encode([chunk.text for chunk in some]), strict=True):
                whole = np.concatenate([tokens, by.end]) if chunk.ends_document else tokens
                file.write(whole.astype(dtype).tobytes())
                count, num_bytes = count + len(whole), num_bytes + len(chunk.text)
            bar.update(sum(chunk.num_bytes for chunk in some))
        file.flush()
        os.fsync(file.fileno())
    return count, num_bytes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the partial folder
    sys.exit(main())
