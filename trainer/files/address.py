"""A folder or file that fsspec reaches, in a bucket or elsewhere, with the methods of Path that are used."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeAlias

from trainer.errors import UserError
from trainer.files.untrusted import printable, reason

# Stores without folders. Making one there could create a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}


class Address:
    """`url` as fsspec writes it: s3://bucket/folder, file:///folder. Equal urls are equal addresses.

    Listings are not cached, since others write there. Credentials are the environment's or fsspec's own.

    Raises:
        FileNotFoundError: from reading what does not exist.
        UserError: from every method, in place of any other error of the store or of its library.
    """

    def __init__(self, url: str, is_dir: bool | None = None) -> None:
        self._url, self._is_dir = url.rstrip("/"), is_dir

    @cached_property
    def _store(self) -> tuple[Any, str]:
        import fsspec  # here, so that what reads no address does not load it

        with self._refusals():
            options = {"auto_mkdir": True} if self._url.startswith("file:") else {}
            found: tuple[Any, str] = fsspec.url_to_fs(self._url, use_listings_cache=False, **options)
            return found

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except Exception as error:  # each store has its own
            words = f"{printable(self)} cannot be reached: {type(error).__name__}: {reason(error)}"
            raise UserError(words) from error

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self._url, self._is_dir)

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        return Address(self._url.rpartition("/")[0])

    def resolve(self) -> "Address":
        return self

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        fs, path = self._store
        with self._refusals():
            return bool(fs.exists(path))

    def is_dir(self) -> bool:
        fs, path = self._store
        if self._is_dir is not None:
            return self._is_dir
        with self._refusals():
            return bool(fs.isdir(path))

    def iterdir(self) -> Iterator["Address"]:
        for name, entry in self._entries().items():
            yield Address(f"{self._url}/{name}", entry["type"] == "directory")

    def sizes(self) -> dict[str, int]:
        """The bytes of each file here, by name."""
        return {name: entry["size"] for name, entry in self._entries().items() if entry["type"] == "file"}

    def _entries(self) -> dict[str, dict[str, Any]]:
        fs, path = self._store
        with self._refusals():
            found = {entry["name"].rstrip("/"): entry for entry in fs.ls(path, detail=True)}
        found.pop(path.rstrip("/"), None)  # some stores list the folder itself
        return {name.rpartition("/")[2]: entry for name, entry in found.items()}

    def size(self) -> int:
        fs, path = self._store
        with self._refusals():
            return int(fs.size(path))

    def read(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of this file."""
        fs, path = self._store
        with self._refusals():
            data: bytes = fs.cat_file(path, start=begin, end=end)
            return data

    def open(self, mode: str = "rb") -> IO[Any]:
        fs, path = self._store
        with self._refusals():
            file: IO[Any] = fs.open(path, mode)
            return file

    def write(self, data: bytes, create: bool = False) -> None:
        """Make this a file of `data`. FileExistsError with `create`, if it exists: of two, one wins.

        Some stores cannot tell: there the last one wins.
        """
        fs, path = self._store
        with self._refusals():
            fs.pipe_file(path, data, mode="create" if create else "overwrite")

    def put(self, file: Path) -> None:
        """Make this a copy of the local `file`."""
        fs, path = self._store
        with self._refusals():
            fs.put_file(str(file), path)

    def make(self) -> None:
        """Make this a folder, where the store has folders."""
        fs, path = self._store
        if self._url.partition(":")[0] not in _FLAT:
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
