"""Convert text to token files: ``python -m trainer.data.tokenize PATH OUT --tokenizer bytes|gpt2|FOLDER``.

PATH is a text or .jsonl file, or a folder of such files. OUT is the folder to create, with train.bin and
val.bin, of uint16 or uint32, and tokens.json, which describes them; data=tokens and nanoGPT can train on it.
FOLDER contains a Hugging Face tokenizer.json, which is copied to OUT.
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

CHUNKS_AT_ONCE = 64  # 8 MiB of text, which are encoded in parallel on all cores


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status: 0, 2 for an invalid argument or file, or 130."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data.tokenize", description=__doc__)
    parser.add_argument(
        "path", type=Path, help="a file, or a folder of files, of text or JSON lines (.jsonl)"
    )
    parser.add_argument("out", type=Path, help="the folder to create; must not exist")
    parser.add_argument("--tokenizer", default="gpt2", metavar="bytes|gpt2|FOLDER")
    parser.add_argument("--field", default="text", help="the key of the text in JSON lines (default: text)")
    fraction = "fraction of the bytes for validation (default: 0.005)"
    parser.add_argument("--eval-fraction", type=float, default=0.005, help=fraction)
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
        print(f"failed to write {chosen.out}: {error}", file=sys.stderr)
        return UserError.exit_code
    print(
        f"{chosen.out}: {facts['train']:,} training and {facts['eval']:,} validation tokens, "
        f"{facts['dtype']}; set data.task.bytes_per_token={facts['bytes_per_token']} to log bits_per_byte"
    )
    return 0


def tokenize(
    texts: TextFiles, out: Path, by: Tokenizer, name: str, eval_fraction: float
) -> dict[str, int | float | str]:
    """Write the folder ``out`` atomically, and return the contents of its tokens.json."""
    if out.exists():
        raise UserError(f"{out} already exists; remove it, or choose another folder")
    if not 0 < eval_fraction < 1:
        raise UserError(f"--eval-fraction={eval_fraction}: expected a number between 0 and 1")
    part = out.with_name(f"{out.name}.part{os.getpid()}")
    dtype = np.dtype(np.uint16 if by.vocab_size <= 2**16 else np.uint32)
    num_train = texts.num_bytes - round(texts.num_bytes * eval_fraction)
    part.mkdir(parents=True)
    try:
        with tqdm(total=texts.num_bytes, unit="B", unit_scale=True, mininterval=0.5, desc=str(out)) as bar:
            splits = itertools.groupby(
                texts.chunks(num_train), lambda chunk: "train" if chunk.start < num_train else "eval"
            )
            written = {split: _write(part / FILES[split], chunks, by, dtype, bar) for split, chunks in splits}
        counts = {split: written.get(split, (0, 0))[0] for split in FILES}
        for split, count in counts.items():
            if not count:
                raise UserError(
                    f"with --eval-fraction={eval_fraction}, none of the {texts.num_bytes:,} bytes of text "
                    f"are in {FILES[split]}; change the fraction, or check the files"
                )
        facts: dict[str, int | float | str] = {
            "tokenizer": name if name in NAMES else TOKENIZER_FILES[0],
            "vocab_size": by.vocab_size,
            "dtype": dtype.name,
            **counts,
            "bytes_per_token": round(sum(size for _, size in written.values()) / sum(counts.values()), 4),
        }
        for file in TOKENIZER_FILES if name not in NAMES else ():
            if (Path(name) / file).is_file():
                shutil.copyfile(Path(name) / file, part / file)
        (part / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return facts


def _write(
    path: Path, chunks: Iterator[TextChunk], by: Tokenizer, dtype: np.dtype, bar: "tqdm[None]"
) -> tuple[int, int]:
    count = num_bytes = 0
    with path.open("wb") as file:
        while group := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
            for chunk, tokens in zip(group, by.encode([chunk.text for chunk in group]), strict=True):
                whole = np.concatenate([tokens, by.end]) if chunk.ends_document else tokens
                file.write(whole.astype(dtype).tobytes())
                count, num_bytes = count + len(whole), num_bytes + len(chunk.text)
            bar.update(sum(chunk.num_bytes for chunk in group))
        file.flush()
        os.fsync(file.fileno())
    return count, num_bytes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the partial folder
    sys.exit(main())
