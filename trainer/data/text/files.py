"""Files of text or JSON lines of any size, in chunks that do not depend on where reading starts."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError

CHUNK_BYTES = 2**17
_GOES_ON = bytes(range(0x80, 0xC0))  # continuation bytes of UTF-8
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")


class TextChunk(NamedTuple):
    """Some text: a document of JSON lines, or about 128 KiB of a file, in whole lines if possible.

    Attributes:
        num_bytes: the length in the file.
        ends_document: whether the document ends here.
    """

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

    def chunks(self, begin: int, end: int) -> Iterator[TextChunk]:
        """The chunks of [begin, end) of the row; both ends are moved to the next start of a line."""
        for path, stop in zip(self.files, self.ends, strict=True):
            start = stop - path.stat().st_size
            if begin < stop and start < end:
                read = self._lines if path.suffix.lower() == ".jsonl" else self._parts
                yield from read(path, max(0, begin - start), end - start)

    def _lines(self, path: Path, begin: int, end: int) -> Iterator[TextChunk]:
        with path.open("rb") as file:
            offset = 0
            if begin:  # it may lie within a line, so start one byte earlier
                file.seek(begin - 1)
                offset = begin - 1 + len(file.readline())
            while offset < end and (line := file.readline()):
                if not line.isspace():
                    yield TextChunk(len(line), self._text(line, path, offset), True)
                offset += len(line)

    def _text(self, line: bytes, path: Path, offset: int) -> bytes:
        try:
            # JSON may hold half a surrogate pair, which text may not: it becomes a question mark.
            return json.loads(line)[self.field].encode(errors="replace")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"the line at byte {offset:,} of {path} is not a JSON object with text under {self.field!r}: "
                f"{type(error).__name__} {error}"
            ) from error

    def _parts(self, path: Path, begin: int, end: int) -> Iterator[TextChunk]:
        """Chunks end with the line that reaches a multiple of CHUNK_BYTES."""
        size = path.stat().st_size
        with path.open("rb") as file:

            def line_end(at: int) -> int:
                """Where the line of byte `at - 1` ends; if that is far, `at`, or the end of its character."""
                if not 0 < at < size:
                    return min(at, size)
                file.seek(at - 1)
                near = file.read(CHUNK_BYTES)
                if (length := near.find(b"\n")) >= 0:
                    return at + length
                rest = len(near[1:5]) - len(near[1:5].lstrip(_GOES_ON))
                return at + rest if rest < 4 else at

            first, stop = line_end(begin), line_end(end)
            while first < stop:
                last = min(line_end((first // CHUNK_BYTES + 1) * CHUNK_BYTES), stop)
                file.seek(first)
                yield TextChunk(last - first, file.read(last - first), last == size)
                first = last
