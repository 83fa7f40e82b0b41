"""A folder or file that fsspec reaches, in a bucket or elsewhere, with the methods of Path that are used."""

import contextlib
import io
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from trainer.errors import NoAccessError, RetryableError, UserError
from trainer.files.untrusted import printable, reason

_T = TypeVar("_T")

# Stores without folders. Making one there could create a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
_PAUSES_S = (1.0, 2.0, 4.0)  # between the tries of a question
_FINAL = (NotImplementedError, ImportError, TypeError, ValueError)  # the same at each try


class UnreachableError(RetryableError):
    """The store gave no answer: what is there is not known."""


class RefusedError(UnreachableError, NoAccessError):
    """It never will: no right, no such store, or its library is missing."""

    exit_code = UserError.exit_code


@dataclass(unsafe_hash=True)
class Address:
    """`url` as fsspec writes it: s3://bucket/folder, file:///folder.

    Listings are not cached, since others write there. Credentials are the environment's or fsspec's own. What
    only reads is tried four times.

    Raises:
        FileNotFoundError: from reading what does not exist.
        UnreachableError: from every method, in place of any other error of the store or of its library.
    """

    url: str
    known_dir: bool | None = field(default=None, compare=False)  # as a listing has said

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")

    @cached_property
    def _store(self) -> tuple[Any, str]:
        import fsspec  # here, so that what reads no address does not load it

        with self._refusals():
            options = {"auto_mkdir": True} if self._is_local else {}
            found: tuple[Any, str] = fsspec.url_to_fs(self.url, use_listings_cache=False, **options)
            return found

    @property
    def _is_local(self) -> bool:
        return self.url.startswith(("file:", "local:"))

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except NotADirectoryError as error:
            raise FileNotFoundError(str(self)) from error
        except Exception as error:  # each store has its own
            words = f"{printable(self)} cannot be reached: {type(error).__name__}: {reason(error)}"
            is_refused = isinstance(error, (PermissionError, *_FINAL))
            raise (RefusedError if is_refused else UnreachableError)(words) from error

    def _ask(self, question: Callable[[Any, str], _T]) -> _T:
        """The answer of the store to a question about the path, which changes nothing there."""
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._refusals():
                    return question(*self._store)
            except UnreachableError as error:
                if pause_s is None or isinstance(error.__cause__, _FINAL):
                    raise
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        return Address(self.url.rpartition("/")[0])

    def resolve(self) -> "Address":
        return self

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        return self._kind() is not None

    def is_dir(self) -> bool:
        if self.known_dir is not None:
            return self.known_dir
        kind = self._kind()
        if kind == "file":  # of a web server, a folder may be one, too
            return self._ask(lambda fs, path: bool(fs.isdir(path)))
        return kind == "directory"

    def _kind(self) -> str | None:
        """What is here: "file", "directory", or None for nothing.

        Not by fsspec's exists and isdir: of most stores they take any error for "no".
        """
        try:
            return str(self._ask(lambda fs, path: fs.info(path))["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator["Address"]:
        for name, entry in self._entries().items():
            yield Address(f"{self.url}/{name}", entry["type"] == "directory")

    def sizes(self) -> dict[str, int]:
        """The bytes of each file here, by name; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            return {name: entry["size"] for name, entry in self._entries().items() if entry["type"] == "file"}
        return {}

    def _entries(self) -> dict[str, dict[str, Any]]:
        path = self._store[1]
        found = {
            entry["name"].rstrip("/"): entry for entry in self._ask(lambda fs, path: fs.ls(path, detail=True))
        }
        found.pop(path.rstrip("/"), None)  # some stores list the folder itself
        return {name.rpartition("/")[2]: entry for name, entry in found.items()}

    def size(self) -> int:
        return self._ask(lambda fs, path: int(fs.size(path)))

    def read(self, begin: int | None = None, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of this file, or all."""
        data: bytes = self._ask(lambda fs, path: fs.cat_file(path, start=begin, end=end))
        return data

    def open(self, mode: str) -> IO[bytes]:
        """A small file, to be read."""
        assert mode == "rb"
        return io.BytesIO(self.read())

    def write(self, data: bytes, create: bool = False) -> None:
        """Make this a file of `data`. FileExistsError with `create`, if it exists: of two, one wins.

        Some stores cannot tell: there the last one wins. An error leaves what was there before, except on
        stores that show a file before it is complete, other than a local disk.
        """
        if create and self._is_local and self.exists():
            raise FileExistsError(str(self))
        mode = "create" if create else "overwrite"
        self._place(lambda fs, path: fs.pipe_file(path, data, mode=mode))

    def put(self, file: Path) -> None:
        """Make this a copy of the local `file`. An error leaves what was there, as with `write`."""
        self._place(lambda fs, path: fs.put_file(str(file), path))

    def _place(self, write: Callable[[Any, str], None]) -> None:
        """Call `write` with where to write: on a local disk a file that then replaces this one."""
        fs, path = self._store
        if not self._is_local:
            with self._refusals():
                write(fs, path)
            return
        beside = f"{path}.{secrets.token_hex(4)}"
        try:
            with self._refusals():
                write(fs, beside)
                fs.mv(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.rm(beside)
            raise

    def make(self) -> None:
        """Make this a folder, where the store has folders."""
        fs, path = self._store
        if self.url.partition(":")[0] not in _FLAT:
            with self._refusals():
                fs.makedirs(path, exist_ok=True)

    def remove(self) -> None:
        """Delete this file or folder, if it exists."""
        fs, path = self._store
        with self._refusals(), contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)


Location: TypeAlias = Path | Address


def location(text: str | Path | Address) -> Location:
    """The address that `text` is, or else a local path."""
    if isinstance(text, str):
        return Address(text) if "://" in text else Path(text)
    return text
