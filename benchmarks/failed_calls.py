"""Make each call of os, open and fsspec on a run's files fail once, and check that the run recovers.

Two ranks under torchrun --max-restarts=3 train the MLP on the digits, with a remote copy of each checkpoint.
One run, which resumes from a checkpoint, records its calls on the files of its run directory. Then, for each
call, path and rank, another run is started in which the first such call raises OSError, with errnos in
rotation and without pauses before restarts. It must end with the same model. Prints a line for each run that
does not, and a table; the exit status is then 1.

    python -m benchmarks.failed_calls [--from fresh] [--only REGEX] [--skip 40] [--limit 20]
"""

import argparse
import builtins
import collections
import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import drilled_run
from tests.failure_parts import inject
from tests.programs import Ended, started, torchrun

ERRNOS = ("EIO", "ENOSPC", "ESTALE", "ETIMEDOUT", "EMFILE")
OS_CALLS = (
    "open replace rename fsync mkdir rmdir unlink link symlink readlink listdir scandir stat lstat pwrite"
)
FSSPEC_CALLS = "put_file get_file cp_file mv ls info rm_file rm makedirs mkdir cat_file pipe_file _open"
SETTINGS = ("train.max_steps=12", "checkpoint.every_steps=3", "train.log_every_steps=2", "resume=auto")
SETTINGS += ("distributed.timeout_s=20", "checkpoint.keep_last=2", "train.eval_every_epochs=1")
_VARIABLE = "FAILED_CALLS"  # environment variable with a folder, and the call that fails in it

# ---- in a rank


class CallRecorder:
    """Records the calls on files in `folder`, and makes one of them fail once on one rank."""

    def __init__(self, folder: Path, wanted: list[str] | None, number: int) -> None:
        self._folder, self._wanted, self._errno = str(folder / "files"), wanted, number
        self._rank, self._open = os.environ["RANK"], os.open
        self._mark, self._records = str(folder / "failed"), str(folder / f"calls{self._rank}")
        self._seen = set[tuple[str, ...]]()

    def record(self, name: str, path: Any) -> None:
        """Record a call; raise OSError if it is the one that must fail."""
        with contextlib.suppress(OSError, TypeError):
            path = str(Path(f"/proc/self/fd/{path}").readlink()) if isinstance(path, int) else os.fspath(path)
        if not isinstance(path, str) or self._folder not in path:
            return
        shown = re.sub(r"[0-9a-f]{8,}|\d+", "N", path.partition(self._folder)[2])
        call = (self._rank, name, shown)
        if call in self._seen:
            return
        self._seen.add(call)
        descriptor = self._open(self._records, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{json.dumps(call)}\n".encode())
        os.close(descriptor)
        if self._wanted == list(call):
            with contextlib.suppress(FileExistsError):
                os.close(self._open(self._mark, os.O_CREAT | os.O_EXCL))
                raise OSError(self._errno, os.strerror(self._errno), path)

    def wrap(self, owner: Any, name: str, shown: str, position: int = 0) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.record(shown, arguments[position] if len(arguments) > position else None)
            return real(*arguments, **named)

        setattr(owner, name, call)

    def wrap_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `open`, with files whose reads and writes can fail too."""
        recorder = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                recorder.record("file.write", self.fileno())
                return super().write(data)

            def readinto(self, buffer: Any) -> int:
                recorder.record("file.read", self.fileno())
                return super().readinto(buffer)

            def readall(self) -> bytes:
                recorder.record("file.read", self.fileno())
                return super().readall()

        def open_(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            recorder.record("open", file)
            if isinstance(file, int) or not str(file).startswith(recorder._folder) or "+" in mode:
                return real(file, mode, buffering, *more, **named)
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            whole = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
            return whole if "b" in mode else io.TextIOWrapper(whole, *more, **named)

        return open_


def run_rank() -> None:
    folder, wanted, number = json.loads(os.environ[_VARIABLE])
    from fsspec.implementations.local import LocalFileSystem

    from trainer.cli import main
    from trainer.launch import exits

    exits.PAUSES_S = (0,)
    recorder = CallRecorder(Path(folder), wanted, number)
    with (Path(folder) / "starts").open("a") as file:
        file.write("x")
    builtins.open = io.open = recorder.wrap_open(io.open)  # type: ignore[assignment]
    for name in OS_CALLS.split():
        recorder.wrap(os, name, f"os.{name}")
    for name in ("flock", "lockf"):
        recorder.wrap(fcntl, name, f"fcntl.{name}")
    for name in FSSPEC_CALLS.split():
        recorder.wrap(LocalFileSystem, name, f"fsspec.{name}", position=1)
    main()


# ---- the runs


def run(folder: Path, wanted: list[str] | None, number: int, *more: str) -> Ended:
    files = folder / "files"
    command = [*torchrun(2, "--max-restarts=3")[:-1], str(Path(__file__).resolve()), *SETTINGS, *more]
    command += [f"run_dir={files}/run", f"checkpoint.remote=file://{files}/remote"]
    variables = {_VARIABLE: json.dumps([str(folder), wanted, number]), "OMP_NUM_THREADS": "1"}
    with started(*command, env=variables) as program:
        return program.wait(240)


def hash_of(folder: Path) -> str | None:
    with contextlib.suppress(OSError):
        return str(json.loads((folder / "files/run/result.json").read_text())["param_sha256"])
    return None


def outcome(folder: Path, ended: Ended, sha256: str | None) -> str:
    if ended.code or hash_of(folder) != sha256:
        return "failed" if ended.code else "different model"
    if not (folder / "failed").exists():
        return "not reached"
    return "restarted" if len((folder / "starts").read_text()) > 2 else "continued"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from",
        dest="begin",
        choices=("resumed", "fresh"),
        default="resumed",
        help="resumed: runs that resume; fresh: new runs",
    )
    parser.add_argument("--only", default="", help="only calls whose name and path match")
    parser.add_argument("--skip", type=int, default=0, help="number of calls to skip")
    parser.add_argument("--limit", type=int, help="maximum number of calls")
    parser.add_argument("--out", type=Path, help="folder for the runs that did not recover")
    options = parser.parse_args()
    with drilled_run.exit_on_signals(), contextlib.ExitStack() as stack:
        root = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="calls-")))
        first_part = root / "first_part"
        (first_part / "files").mkdir(parents=True)
        if options.begin == "resumed":  # each run resumes from here
            run(first_part, None, 0, *inject("kill", 1, 7, mark=first_part / "killed"), "train.max_steps=6")
        ended = run(_copy(first_part, root / "uninterrupted"), None, 0)
        expected = hash_of(root / "uninterrupted")
        assert ended.code == 0 and expected is not None, ended.output[-3000:]
        lines = [path.read_text().splitlines() for path in sorted((root / "uninterrupted").glob("calls?"))]
        calls = [json.loads(line) for line in dict.fromkeys(itertools.chain(*lines))]
        calls = [call for call in calls if re.search(options.only, " ".join(call))]
        print(f"{len(calls)} calls; uninterrupted run: {expected[:12]}", flush=True)
        found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        attempts = list(zip(calls, itertools.cycle(ERRNOS)))[options.skip :][: options.limit]
        for count, (call, name) in enumerate(attempts, options.skip):
            folder = _copy(first_part, root / str(count))
            ended = run(folder, call, getattr(errno, name))
            result = outcome(folder, ended, expected)
            found[call[1]][result] += 1
            if result in ("failed", "different model"):
                last = [line for line in ended.output.splitlines() if name in line or "Errno" in line]
                print(f"  {result}: {name} in {' '.join(call)}: {last[-1:]}", flush=True)
                (folder / "output").write_text(ended.output)
            else:
                shutil.rmtree(folder)
    kinds = ("continued", "restarted", "not reached", "different model", "failed")
    print(f"{'':<20}" + "".join(f"{kind:>16}" for kind in kinds))
    found["all"] = sum(found.values(), collections.Counter())
    for name, counts in found.items():
        print(f"{name:<20}" + "".join(f"{counts[kind]:>16}" for kind in kinds))
    return int(any(found["all"][kind] for kind in kinds[3:]))


def _copy(first_part: Path, folder: Path) -> Path:
    shutil.copytree(first_part / "files", folder / "files", symlinks=True)
    return folder


if __name__ == "__main__":
    if _VARIABLE in os.environ:
        run_rank()
    else:
        sys.exit(main())
