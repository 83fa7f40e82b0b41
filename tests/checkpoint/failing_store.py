"""An unreliable store: `failing:///folder` is a folder on the local disk whose calls can be made to fail."""

from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem


class FailingStore(LocalFileSystem):
    """A store whose exists and isdir return False on any error, as in most of fsspec's stores.

    `failures` is the number of calls that still fail, by method and part of the path; they raise `error`.
    """

    protocol = "failing"
    cachable = False
    failures: ClassVar[dict[tuple[str, str], int]] = {}
    error: ClassVar[OSError] = OSError("500 Internal Server Error")
    isdir = AbstractFileSystem.isdir

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        stripped: str = LocalFileSystem._strip_protocol(str(path).removeprefix("failing://"))
        return stripped

    def info(self, path: Any, **options: Any) -> Any:
        self._fail("info", path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._fail("ls", path)
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        self._fail("cat_file", path)
        return super().cat_file(path, start, end, **options)

    def _fail(self, method: str, path: Any) -> None:
        for (of, part), left in self.failures.items():
            if of == method and part in str(path) and left:
                self.failures[of, part] -= 1
                raise self.error


fsspec.register_implementation("failing", FailingStore, clobber=True)
