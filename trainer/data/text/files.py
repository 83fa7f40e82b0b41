"""Read text and JSON lines files of any size, in chunks of whole lines."""

import itertools
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError

CHUNK_BYTES = 2**17
_CONTINUATION = bytes(range(0x80, 0xC0))  # continuation bytes of UTF-8
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")


class TextChunk(NamedTuple):
    """The text of one JSON line, or about 128 KiB of a text file, in whole lines if possible."""

    start: int  # offset in the concatenation of all files
    num_bytes: int  # length in the file
    text: bytes
    ends_document: bool


class TextFiles:
    """The concatenation of the files at a path, sorted by name.

    Args:
        path: a file, or a folder of files, including sub-folders; hidden files are skipped. Files named
            .jsonl contain a JSON object per line, all other files plain text.
        field: the key of the text in a JSON object.
    """

    def __init__(self, path: str | Path, field: str = "text") -> None:
        root, self.field = Path(path), field
        if not root.exists():
            raise UserError(f"{root} does not exist")
        paths = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
        self.files = [
            file for file in paths if not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
        if compressed := [file for file in self.files if file.suffix.lower() in COMPRESSED]:
            raise UserError(f"{compressed[0]} is not supported: expected text or JSON lines; decompress it")
        self.ends = list(itertools.accumulate(file.stat().st_size for file in self.files))
        if not self.ends or not self.ends[-1]:
            raise UserError(f"{root} contains no text")

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    def chunks(self, border: int) -> Iterator[TextChunk]:
        """Yield all chunks. The chunk that contains byte `border` ends at the end of that byte's line."""
        for path, end in zip(self.files, self.ends, strict=True):
            start = end - path.stat().st_size
            with path.open("rb") as file:
                read = self._lines if path.suffix.lower() == ".jsonl" else self._parts
                for chunk in read(file, border - start):
                    yield chunk._replace(start=start + chunk.start)

    def _lines(self, file: BufferedReader, border: int) -> Iterator[TextChunk]:
        start = 0
        for line in file:
            if not line.isspace():
                yield TextChunk(start, len(line), self._text(line, file.name, start), True)
            start += len(line)

    def _text(self, line: bytes, path: str, offset: int) -> bytes:
        try:
            # JSON may contain a lone surrogate, which UTF-8 cannot encode: it becomes a question mark.
            return json.loads(line)[self.field].encode(errors="replace")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"the line at byte {offset:,} of {path} is not a JSON object with a string in the field "
                f"{self.field!r}: {type(error).__name__} {error}"
            ) from error

    def _parts(self, file: BufferedReader, border: int) -> Iterator[TextChunk]:
        start = 0
        while True:
            stops = ((start // CHUNK_BYTES + 1) * CHUNK_BYTES, border)
            text = file.read(min(stop for stop in stops if stop > start) - start)
            if not text:
                return
            text += b"" if text.endswith(b"\n") else _rest_of_line(file)
            yield TextChunk(start, len(text), text, not file.peek(1))
            start += len(text)


def _rest_of_line(file: BufferedReader) -> bytes:
    """Read the rest of the line or, in a line longer than a chunk, the rest of the UTF-8 character."""
    position, ahead = file.tell(), file.read(CHUNK_BYTES)
    length = ahead.find(b"\n") + 1
    if not length:
        length = len(ahead[:4]) - len(ahead[:4].lstrip(_CONTINUATION))
        length = length if length < 4 else 0
    file.seek(position + length)
    return ahead[:length]
