"""How many tests run side by side; and leak guards: a test that leaves a process or a network namespace behind
fails, and what it left is ended."""

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

gc.disable()  # while all is imported: collections that find nothing are a quarter of it
# To compile the tests and the project takes 2.5 s, and each process of a session would do it again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Several ranks share the cores of the machine, and a single process reduces in the same order as they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of torch.compile the tests ask what it means, not how fast it is: vectors take half of its time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inherited by all that the tests start, also through a parent that has died since.
_MARK = f"RINGMASTER_TESTS_OF={os.getpid()}".encode()
os.environ["RINGMASTER_TESTS_OF"] = str(os.getpid())
_GRACE_S = 20.0
QUICK = "not slow"  # what pyproject.toml's addopts give to -m
# The settings composed by tests.runs, for all processes of the session.
_SETTINGS = None
if "RINGMASTER_TESTS_SETTINGS" not in os.environ:
    _SETTINGS = tempfile.TemporaryDirectory(prefix="ringmaster-tests-")
    os.environ["RINGMASTER_TESTS_SETTINGS"] = _SETTINGS.name

# A shell starts what goes into the background deaf to Ctrl-C, and all that pytest starts would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _pids() -> set[int]:
    return {int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()}


def _processes(but: Set[int]) -> dict[int, str]:
    """Command line by pid of what this session started, except multiprocessing's own two helpers and the ranks
    that wait for the next test."""
    found = {}
    ranks = sys.modules.get("tests.ranks")
    for pid in _pids() - but - (ranks.live_pids() if ranks else set()):
        folder = Path("/proc", str(pid))
        # A process may end at any moment while it is looked at.
        with contextlib.suppress(OSError):
            if _MARK not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            state, parent = fields[0], int(fields[1])
            servant = "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command
            if state != "Z" and not (servant and parent == os.getpid()):
                found[pid] = command
    return found


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name.startswith(f"rm{os.getpid()}-")}


def pytest_configure(config: pytest.Config) -> None:
    """A slow test that is named by its id runs, though no `-m ''` is given. A machine with a GPU tests what every
    other tests, in as many ranks, and its GPU with `-m cuda`."""
    if config.option.markexpr == QUICK and any("::" in name for name in config.args):
        config.option.markexpr = ""
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Slow tests wait half their time, fast ones do not. Where a part is named all run in this process: to load
    what tests need takes a worker longer than most of them."""
    if config.args != config.getini("testpaths"):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores if config.option.markexpr == QUICK else 2 * cores, 12)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, or at the end some worker would be busy with them alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Exclude all loaded objects from garbage collection: torch alone takes 0.3 s each time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # The interpreter means to end by taking all apart, and complains of what it cannot. Not before: pytest's end
    # collects five times.
    atexit.register(gc.unfreeze)


def pytest_unconfigure() -> None:
    if _SETTINGS is not None:
        _SETTINGS.cleanup()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
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
