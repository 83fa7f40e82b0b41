"""Files of text or JSON lines of any size, in chunks of whole lines."""

import itertools
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError

CHUNK_BYTES = 2**17
_GOES_ON = bytes(range(0x80, 0xC0))  # continuation bytes of UTF-8
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")


class TextChunk(NamedTuple):
    """Some text: a document of JSON lines, or about 128 KiB of a file, in whole lines if possible.

    Attributes:
        begin: its first byte, in the row of all files.
        num_bytes: the length in the file.
        ends_document: whether the document ends here.
    """

    begin: int
    num_bytes: int
    text: bytes
    ends_document: bool


class TextFiles:
    """The files at a path, sorted by name, as one long row of bytes.

    Args:
        path: a file, or a folder of them, sub-folders too; hidden files are left out. Files named .jsonl hold
            a JSON object on each line, all others plain text.
        field: the key of the text in such an object.

    Raises:
        UserError: the path holds no text; or, while reading, a line is not such an object.
    """

    def __init__(self, path: str | Path, field: str = "text") -> None:
        root, self.field = Path(path), field
        if not root.exists():
            raise UserError(f"{root} does not exist")
        found = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
        self.files = [
            file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
        if packed := [file for file in self.files if file.suffix.lower() in PACKED]:
            raise UserError(f"{packed[0]} is compressed, but must be text or JSON lines; decompress it")
        self.ends = list(itertools.accumulate(file.stat().st_size for file in self.files))
        if not self.ends or not self.ends[-1]:
            raise UserError(f"{root} contains no text")

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    def chunks(self, border: int) -> Iterator[TextChunk]:
        """The whole row. A chunk that begins before byte `border` ends with the line that reaches it."""
        for path, end in zip(self.files, self.ends, strict=True):
            begin = end - path.stat().st_size
            with path.open("rb") as file:
                read = self._lines if path.suffix.lower() == ".jsonl" else self._parts
                for chunk in read(file, border - begin):
                    yield chunk._replace(begin=begin + chunk.begin)

    def _lines(self, file: BufferedReader, border: int) -> Iterator[TextChunk]:
        begin = 0
        for line in file:
            if not line.isspace():
                yield TextChunk(begin, len(line), self._text(line, file.name, begin), True)
            begin += len(line)

    def _text(self, line: bytes, path: str, offset: int) -> bytes:
        try:
            # JSON may hold half a surrogate pair, which text may not: it becomes a question mark.
            return json.loads(line)[self.field].encode(errors="replace")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"the line at byte {offset:,} of {path} is not a JSON object with text under {self.field!r}: "
                f"{type(error).__name__} {error}"
            ) from error

    def _parts(self, file: BufferedReader, border: int) -> Iterator[TextChunk]:
        """Chunks end with the line that reaches a multiple of CHUNK_BYTES, or the border."""
        begin = 0
        while True:
            stops = ((begin // CHUNK_BYTES + 1) * CHUNK_BYTES, border)
            text = file.read(min(stop for stop in stops if stop > begin) - begin)
            if not text:
                return
            text += b"" if text.endswith(b"\n") else _rest_of_line(file)
            yield TextChunk(begin, len(text), text, not file.peek(1))
            begin += len(text)


def _rest_of_line(file: BufferedReader) -> bytes:
    """What follows, to the end of the line; if that is far, to the end of the character."""
    here, near = file.tell(), file.read(CHUNK_BYTES)
    length = near.find(b"\n") + 1
    if not length:
        length = len(near[:4]) - len(near[:4].lstrip(_GOES_ON))
        length = length if length < 4 else 0
    file.seek(here + length)
    return near[:length]
