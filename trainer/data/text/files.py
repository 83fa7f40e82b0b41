"""Files of text or JSON lines of any size, in chunks that do not depend on where reading starts."""

import bisect
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError

CHUNK_BYTES = 2**17
_GOES_ON = bytes(range(0x80, 0xC0))  # continuation bytes of UTF-8
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")


@dataclass(frozen=True)
class TextChunk:
    """Some text: a document of JSON lines, or about 128 KiB of a file, in whole lines if possible.

    Attributes:
        file: the file's number.
        offset: the position of the first byte in the file.
        num_bytes: the length in the file.
        ends_document: whether the document ends here.
    """

    file: int
    offset: int
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
        file = bisect.bisect_right(self.ends, begin)
        start = self.ends[file - 1] if file else 0
        return self.chunks_from(file, begin - start, end)

    def chunks_from(self, file: int, offset: int, end: int) -> Iterator[TextChunk]:
        """The chunks from ``offset`` in a file up to ``end`` of the row."""
        for number in range(file, len(self.files)):
            start = self.ends[number - 1] if number else 0
            if start >= end:
                return
            read = self._lines if self.files[number].suffix.lower() == ".jsonl" else self._parts
            yield from read(number, offset, end - start)
            offset = 0

    def _lines(self, number: int, begin: int, end: int) -> Iterator[TextChunk]:
        path = self.files[number]
        with path.open("rb") as file:
            offset = 0
            if begin:  # it may lie within a line, so start one byte earlier
                file.seek(begin - 1)
                offset = begin - 1 + len(file.readline())
            while offset < end and (line := file.readline()):
                if not line.isspace():
                    yield TextChunk(number, offset, len(line), self._text(line, path, offset), True)
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

    def _parts(self, number: int, begin: int, end: int) -> Iterator[TextChunk]:
        """Chunks end with the line that reaches a multiple of CHUNK_BYTES, or right there if none ends soon.

        A character that this would split belongs to the first chunk.
        """
        size = self.files[number].stat().st_size
        with self.files[number].open("rb") as file:

            def aligned(at: int) -> int:
                """The aligned position, a fixed point: aligned(aligned(at)) is aligned(at)."""
                if not 0 < at < size:
                    return min(at, size)
                file.seek(at - 1)
                return at + max(0, file.read(CHUNK_BYTES).find(b"\n"))

            def character_start(at: int) -> int:
                """The position after continuation bytes of UTF-8."""
                file.seek(at)
                near = file.read(4)
                rest = len(near) - len(near.lstrip(_GOES_ON))
                return at + rest if at > 0 and rest < 4 else at

            first, stop = aligned(begin), aligned(end)
            for block in itertools.count(first // CHUNK_BYTES + 1):
                if first >= stop:
                    return
                if (last := min(aligned(block * CHUNK_BYTES), stop)) > first:
                    start, end_of_text = character_start(first), character_start(last)
                    file.seek(start)
                    yield TextChunk(number, first, last - first, file.read(end_of_text - start), last == size)
                    first = last
