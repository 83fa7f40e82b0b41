"""Set the number of parallel tests, and fail tests that leave processes or network namespaces behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

gc.disable()  # during imports, of whose time collections are a quarter
# Compiling the tests and the project takes 2.5 s, and each process of a session would do it again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ranks share the cores of the machine, and a single process must reduce in the same order as they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests of torch.compile check results, not speed; vectorisation takes half of the compile time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inherited by all processes that tests start, also if their parent has died.
_MARK = f"RINGMASTER_TESTS_OF={os.getpid()}".encode()
os.environ["RINGMASTER_TESTS_OF"] = str(os.getpid())
_GRACE_S = 20.0
QUICK = "not slow"  # -m in the addopts of pyproject.toml
# Cache of the settings composed by tests.runs, for all processes of the session.
_SETTINGS = None
if "RINGMASTER_TESTS_SETTINGS" not in os.environ:
    _SETTINGS = tempfile.TemporaryDirectory(prefix="ringmaster-tests-")
    os.environ["RINGMASTER_TESTS_SETTINGS"] = _SETTINGS.name

# A shell starts background jobs with SIGINT ignored, and all processes of the tests would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _pids() -> set[int]:
    return {int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()}


def _processes(but: Set[int]) -> dict[int, str]:
    """Return command lines by pid of the session's processes, except multiprocessing's own and idle ranks."""
    found = {}
    ranks = sys.modules.get("tests.ranks")
    for pid in _pids() - but - (ranks.idle_pids() if ranks else set()):
        folder = Path("/proc", str(pid))
        with contextlib.suppress(OSError):  # the process may end at any moment
            if _MARK not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            state, parent = fields[0], int(fields[1])
            is_of_multiprocessing = (
                "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command
            )
            if state != "Z" and not (is_of_multiprocessing and parent == os.getpid()):
                found[pid] = command
    return found


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name.startswith(f"rm{os.getpid()}-")}


def pytest_configure(config: pytest.Config) -> None:
    """Run slow tests that are named by ID also without `-m ''`; use GPUs only with `-m cuda`."""
    if config.option.markexpr == QUICK and any("::" in name for name in config.args):
        config.option.markexpr = ""
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use two workers per core for slow tests, which wait half the time. If tests are named, use no workers, because
    importing everything takes longer than most tests."""
    if config.args != config.getini("testpaths"):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores if config.option.markexpr == QUICK else 2 * cores, 12)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that workers end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Exclude loaded objects from garbage collection, which takes 0.3 s for torch alone."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # Only at exit: without it the interpreter reports objects that it cannot free, and pytest collects five times.
    atexit.register(gc.unfreeze)


def pytest_unconfigure() -> None:
    if _SETTINGS is not None:
        _SETTINGS.cleanup()


@pytest.fixture(autouse=True)
def _check_leftovers() -> Iterator[None]:
    pids, namespaces = _pids(), _namespaces()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := _processes(but=pids):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in (names := _namespaces() - namespaces):
        subprocess.run(["ip", "netns", "delete", name], check=False, timeout=30)
    assert not left, f"processes left behind: {left}"
    assert not names, f"network namespaces left behind: {names}"
