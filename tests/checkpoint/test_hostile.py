"""Dozens of hostile checkpoints: none runs code, hangs, takes a gigabyte, or causes a traceback."""

import contextlib
import io
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import hostile, tiny
from tests.ranks import run_ranks
from trainer.checkpoint import load_weights, resuming
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.errors import UserError

DEADLINE_S = 30  # for what takes a tenth of a second
ALLOWED_BYTES = 1 << 30


def _save(run_dir: Path, format: str) -> None:
    state = tiny.train_state(sharded=format == "sharded")
    saver = tiny.checkpointer(run_dir, format=format, state=state)
    for _ in range(2):
        tiny.train(state, 1)
        saver.save(state)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Within the deadline, and within the allowed memory above the present use."""

    def too_late(*args: Any) -> None:
        raise TimeoutError(f"not done after {DEADLINE_S} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(DEADLINE_S)
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    try:
        yield
    finally:
        signal.alarm(0)
    peak = _resident_bytes("VmHWM") - before
    assert peak < ALLOWED_BYTES, f"it took {peak >> 20} MiB"


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _command(*arguments: object) -> int:
    """The exit status of the command; its output has no escape sequences."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    for stream in (out, err):
        stream.flush()
        printed = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
        assert printed.replace("\n", "").isprintable(), repr(printed)
        assert not any(line.startswith("forged") for line in printed.splitlines()), printed
    return status


def _one_line(message: str) -> None:
    assert message.isprintable() and len(message) < 2000, repr(message)


def _refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except UserError as error:
        _one_line(str(error))
        return str(error)
    raise AssertionError("it was taken")


WAYS = ("verify", "show", "convert", "weights", "go on")


def _try(run_dir: Path, restorer: Any, state: Any, lines: _Lines, way: str) -> str:
    """Read the hostile checkpoint by its path, in the run to resume, as weights, and in one more way; returns
    how ``resume=auto`` took it."""
    path = run_dir / "checkpoints" / hostile.STEP
    reason = _refused(lambda: tiny.restore(restorer, state, str(path)))
    assert state.progress.step == 7
    lines.lines.clear()
    source = restorer.find("auto")
    assert source is not None
    if source.directory.name == hostile.STEP:
        _refused(lambda: restorer.restore(state, source))
        assert state.progress.step == 7
        return f"refused: {reason}"
    assert source.manifest.step == 1
    about_it = [line for line in lines.lines if "passing over" in line]
    assert len(about_it) == 1 and hostile.STEP in about_it[0], lines.lines
    _one_line(about_it[0])
    words = {"verify": [path], "show": [run_dir], "convert": [path, run_dir / "out", "--to", "torch"]}
    if way == "go on":
        restorer.restore(state, source)
        assert state.progress.step == 1
    elif way == "weights":
        load_weights(tiny.Net(), run_dir)
    else:
        assert _command(way, *words[way]) == 2
        assert sorted(entry.name for entry in run_dir.iterdir() if "out" in entry.name) == []
    _refused(lambda: load_weights(tiny.Net(), path))
    return f"passed over: {reason}"


def _meet(root: Path, names: list[str]) -> dict[str, str]:
    """The outcome of each kind, or its failure."""
    resource.setrlimit(
        resource.RLIMIT_AS, (_resident_bytes("VmSize") + (8 << 30),) * 2
    )  # for the machine's sake
    os.chdir(root)
    lines, found, restorer = _Lines(), {}, tiny.checkpointer(root / "run")
    logging.getLogger("trainer").addHandler(lines)
    before = None
    for number, name in enumerate(names):  # each of these ways takes every fifth: all read in the same way
        misfit = name.startswith("misfit ")
        format, change = ("full", hostile.MISFITS[name[7:]]) if misfit else hostile.KINDS[name]
        run_dir = root / "run"
        shutil.copytree(root / format, run_dir, symlinks=True)
        change(run_dir / "checkpoints" / hostile.STEP)
        state = tiny.train_state(seed=3)
        state.progress.step = 7
        before = tiny.everything(state)
        try:
            with _bounded():
                found[name] = _try(run_dir, restorer, state, lines, WAYS[number % len(WAYS)])
            if found[name].startswith("refused"):
                tiny.assert_same(tiny.everything(state), before)
        except BaseException as error:
            found[name] = f"WRONG: {type(error).__name__}: {error}"
        shutil.rmtree(run_dir)
        (root / "moved").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_checkpoints_do_no_harm(tmp_path: Path, every: int) -> None:
    """Of the kinds, which differ least from the next, every 24th in each of the five ways."""
    names = [*hostile.KINDS, *(f"misfit {name}" for name in hostile.MISFITS)]
    assert len(names) >= 300
    names = names[::every]
    for format, world in (("full", 1), ("sharded", 2)):
        run_ranks(_save, world, tmp_path / format, format)
    found = run_ranks(_meet, 1, tmp_path, names, timeout_s=280)[0]
    assert not list(tmp_path.rglob("ran")), "code was run"
    wrong = {name: outcome for name, outcome in found.items() if outcome.startswith("WRONG")}
    assert not wrong, "\n".join(f"{name}: {outcome}" for name, outcome in wrong.items())
    refused = {name for name in names if found[name].startswith("refused")}
    assert refused == {name for name in names if name.startswith("misfit")}


def _meet_weights(root: Path) -> dict[str, str]:
    os.chdir(root)
    found = {}
    for name, make in hostile.FILES.items():
        path = root / "weights.pt"
        make(path)
        model = tiny.Net()
        before = model.first.weight.clone()
        try:
            with _bounded():
                found[name] = _refused(lambda path=path, model=model: load_weights(model, path))  # type: ignore[misc]
            assert model.first.weight.equal(before)
        except BaseException as error:
            found[name] = f"WRONG: {type(error).__name__}: {error}"
        path.rmdir() if path.is_dir() else path.unlink()
    return found


def test_hostile_weights_do_no_harm(tmp_path: Path) -> None:
    found = run_ranks(_meet_weights, 1, tmp_path)[0]
    assert not list(tmp_path.rglob("ran")), "code was run"
    wrong = {name: outcome for name, outcome in found.items() if outcome.startswith("WRONG")}
    assert not wrong, "\n".join(f"{name}: {outcome}" for name, outcome in wrong.items())


def _one_rank_sees_it(run_dir: Path) -> list[str]:
    """The error on each rank if only rank 1 cannot read the state, and then the numbers."""
    state, rank = tiny.train_state(seed=3), tiny.facts().rank
    path, heard = run_dir / "checkpoints" / hostile.STEP, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise UserError("this host sees another disk")

    for module, name in ((resuming, "verified"), (resuming, "check_fits"), (OpenCheckpoint, "read_into")):
        good = getattr(module, name)
        if rank == 1:
            setattr(module, name, fail)
        heard.append(_refused(lambda: tiny.restore(tiny.checkpointer(run_dir), state, str(path))))
        setattr(module, name, good)
    assert tiny.restore(tiny.checkpointer(run_dir), state, str(path))
    return heard


@pytest.mark.slow
def test_all_ranks_refuse_what_one_cannot_read(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path, "full")
    expected = ["rank 1: this host sees another disk"] * 3
    assert run_ranks(_one_rank_sees_it, 2, tmp_path) == [expected, expected]


def test_show_cannot_be_made_to_forge_a_line(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path, "full")
    path = tmp_path / "checkpoints" / hostile.STEP
    hostile.state("strategy", to=hostile.ESCAPE)(path)
    hostile.state("torch_version", to=hostile.ESCAPE)(path)
    hostile.sign(path, metrics={hostile.ESCAPE: 1.0})
    assert _command("show", path) == _command("verify", path) == 0
