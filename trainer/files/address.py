"""Files and folders at a URL, such as in a bucket, with methods like those of Path."""

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

# Stores without folders, where creating a folder could create a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
_PAUSES_S = (1.0, 2.0, 4.0)  # between attempts
_PERMANENT = (NotImplementedError, ImportError, TypeError, ValueError)  # retrying does not help


class UnreachableError(RetryableError):
    """The store did not answer, so its contents are unknown."""


class RefusedError(UnreachableError, NoAccessError):
    """Access is denied, the store does not exist, or its library is missing; retrying does not help."""

    exit_code = UserError.exit_code


@dataclass(unsafe_hash=True)
class Address:
    """A URL in the syntax of fsspec, such as s3://bucket/folder or file:///folder.

    Listings are not cached, because other processes may change the folder. Credentials come from the
    environment or the configuration of fsspec. Reads are attempted four times.

    Raises:
        FileNotFoundError: on reading, if the file or folder does not exist.
        UnreachableError: from every method, in place of any other error of the store or its library.
    """

    url: str
    known_dir: bool | None = field(default=None, compare=False)  # whether a listing showed a directory

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")

    @cached_property
    def _store(self) -> tuple[Any, str]:
        import fsspec  # not at module level, because most runs use no address

        with self._translated_errors():
            options = {"auto_mkdir": True} if self._is_local else {}
            store: tuple[Any, str] = fsspec.url_to_fs(self.url, use_listings_cache=False, **options)
            return store

    @property
    def _is_local(self) -> bool:
        return self.url.startswith(("file:", "local:"))

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except NotADirectoryError as error:
            raise FileNotFoundError(str(self)) from error
        except Exception as error:  # each store has its own exception types
            message = f"{printable(self)} cannot be reached: {type(error).__name__}: {reason(error)}"
            is_permanent = isinstance(error, (PermissionError, *_PERMANENT))
            raise (RefusedError if is_permanent else UnreachableError)(message) from error

    def _query(self, query: Callable[[Any, str], _T]) -> _T:
        """Return the result of `query`, a function of the file system and the path without side effects."""
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._translated_errors():
                    return query(*self._store)
            except UnreachableError as error:
                if pause_s is None or isinstance(error.__cause__, _PERMANENT):
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
        if kind == "file":  # on a web server, it may be a folder as well
            return self._query(lambda fs, path: bool(fs.isdir(path)))
        return kind == "directory"

    def _kind(self) -> str | None:
        """Return "file", "directory", or None if nothing exists.

        fsspec's exists and isdir are not used, because for most stores they return False on any error.
        """
        try:
            return str(self._query(lambda fs, path: fs.info(path))["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator["Address"]:
        for name, entry in self._entries().items():
            yield Address(f"{self.url}/{name}", entry["type"] == "directory")

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in this folder, by name; {} if the folder does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return {name: entry["size"] for name, entry in self._entries().items() if entry["type"] == "file"}
        return {}

    def _entries(self) -> dict[str, dict[str, Any]]:
        path = self._store[1]
        listed = self._query(lambda fs, path: fs.ls(path, detail=True))
        entries = {entry["name"].rstrip("/"): entry for entry in listed}
        entries.pop(path.rstrip("/"), None)  # some stores list the folder itself
        return {name.rpartition("/")[2]: entry for name, entry in entries.items()}

    def size(self) -> int:
        return self._query(lambda fs, path: int(fs.size(path)))

    def read(self, begin: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes [begin, end) of this file; all by default."""
        data: bytes = self._query(lambda fs, path: fs.cat_file(path, start=begin, end=end))
        return data

    def open(self, mode: str) -> IO[bytes]:
        """Open a small file for reading; its whole contents are read immediately."""
        assert mode == "rb"
        return io.BytesIO(self.read())

    def write(self, data: bytes, create: bool = False) -> None:
        """Write `data` to this file; with `create`, raise FileExistsError if it exists.

        After an error the previous file is unchanged, except on stores that show incomplete files. If two
        processes create a file, one fails, except on stores that do not support this.
        """
        if create and self._is_local and self.exists():
            raise FileExistsError(str(self))
        mode = "create" if create else "overwrite"
        self._replace(lambda fs, path: fs.pipe_file(path, data, mode=mode))

    def put(self, file: Path) -> None:
        """Copy the local `file` to this URL; for errors, see `write`."""
        self._replace(lambda fs, path: fs.put_file(str(file), path))

    def _replace(self, write: Callable[[Any, str], None]) -> None:
        """Call `write` with the path or, on a local disk, with a temporary path that is then renamed."""
        fs, path = self._store
        if not self._is_local:
            with self._translated_errors():
                write(fs, path)
            return
        temporary = f"{path}.{secrets.token_hex(4)}"
        try:
            with self._translated_errors():
                write(fs, temporary)
                fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.rm(temporary)
            raise

    def make(self) -> None:
        """Create this folder, if the store has folders."""
        fs, path = self._store
        if self.url.partition(":")[0] not in _FLAT:
            with self._translated_errors():
                fs.makedirs(path, exist_ok=True)

    def remove(self) -> None:
        """Delete this file or folder, if it exists."""
        fs, path = self._store
        with self._translated_errors(), contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)


Location: TypeAlias = Path | Address


def location(text: str | Path | Address) -> Location:
    """Return an `Address` if `text` contains "://", otherwise a local path."""
    if isinstance(text, str):
        return Address(text) if "://" in text else Path(text)
    return text
