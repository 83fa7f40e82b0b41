"""checkpoint.remote at a store that fails, is written by others, or loses a file: nothing is lost or mixed there."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint import tiny
from tests.checkpoint.failing_store import FailingStore
from tests.checkpoint.test_remote import _claimed, _save, _steps_there, _wait
from tests.ranks import run_ranks
from trainer.checkpoint import listing, store
from trainer.checkpoint.listing import Listing, Retention, newest_of
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.remote import Remote, fetch_history
from trainer.checkpoint.store import Store
from trainer.errors import UserError
from trainer.files.address import Address, UnreachableError

QUESTIONS = (("info", "checkpoints"), ("ls", "checkpoints"), ("info", "20/manifest.json"))
READS = (("info", "20/a.txt"), ("cat_file", "20/manifest.json"), ("cat_file", "20/a.txt"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("trainer.files.address._PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("trainer.checkpoint.remote._FIRST_PAUSE_S", 0.01)
    yield
    FailingStore.failures.clear()


def _address(root: Path) -> Address:
    return Address(f"failing://{root / 'there'}")


def _run(root: Path, name: str = "run") -> tuple[Store, Remote]:
    here = Store(root / name / "checkpoints", "one")
    here.root.mkdir(parents=True, exist_ok=True)
    return here, Remote(_address(root), here, Retention(last=2))


def _copied(root: Path, *steps: int) -> tuple[Store, Remote]:
    here, remote = _run(root)
    for step in steps:
        _save(here, step)
        remote.follow(step)
        remote.finish(10)
    return here, remote


def _put_waits(
    monkeypatch: pytest.MonkeyPatch, at: Callable[[Address], bool]
) -> tuple[threading.Event, threading.Event]:
    """Have `Address.put` wait at some files; return an event that is set then, and one that it waits for."""
    put, waits, gate = Address.put, threading.Event(), threading.Event()

    def waiting(address: Address, file: Path) -> None:
        if at(address):
            waits.set()
            assert gate.wait(20)
        put(address, file)

    monkeypatch.setattr(Address, "put", waiting)
    return waits, gate


@pytest.mark.parametrize("call", [*QUESTIONS, *READS])
def test_the_newest_is_found_though_a_call_fails_thrice(tmp_path: Path, call: tuple[str, str]) -> None:
    _copied(tmp_path, 10, 20)
    elsewhere, remote = _run(tmp_path, "elsewhere")
    FailingStore.failures[call] = 3
    newest = newest_of(elsewhere, remote.listings)[0]
    verify(newest)
    assert newest.name == "step_00000020"
    if call != ("info", "20/manifest.json"):  # what is listed is not asked for
        assert FailingStore.failures[call] == 0


@pytest.mark.parametrize(
    "call", [("info", "checkpoints"), ("ls", "checkpoints"), ("cat_file", "20/manifest")]
)
def test_no_answer_is_not_taken_for_nothing(
    tmp_path: Path, call: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Else resume=auto would begin at step 0, or go on from an older step, without a word."""
    here, _ = _copied(tmp_path, 10, 20)
    elsewhere, remote = _run(tmp_path, "elsewhere")
    FailingStore.failures[call] = 1000
    with pytest.raises(UnreachableError, match="cannot be reached: OSError: 500"):
        newest_of(elsewhere, remote.listings)
    assert [path.name[-2:] for path in newest_of(here, remote.listings)] == ["20", "10"]
    assert "500 Internal Server Error; going by what is in" in caplog.text


def test_what_is_read_as_a_file_is_tried_again_too(tmp_path: Path) -> None:
    metrics = b'{"step": 1}\n' * 200_000
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "metrics.jsonl").write_bytes(metrics)
    FailingStore.failures["cat_file", "metrics.jsonl"] = 3
    fetch_history(str(_address(tmp_path)), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    FailingStore.failures["cat_file", "metrics.jsonl"] = 1000
    with pytest.raises(UnreachableError, match=r"metrics\.jsonl cannot be reached: OSError: 500"):
        fetch_history(str(_address(tmp_path)), tmp_path)


def test_a_store_that_does_not_answer_loses_no_checkpoint(tmp_path: Path) -> None:
    here, _ = _copied(tmp_path, 10, 20)
    FailingStore.failures["info", "20/manifest.json"] = 1000
    restarted = Remote(_address(tmp_path), here, Retention(last=2))
    restarted.follow()
    _wait(lambda: FailingStore.failures["info", "20/manifest.json"] < 990)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    FailingStore.failures.clear()
    restarted.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    for step in _steps_there(tmp_path):
        verify(_address(tmp_path) / "checkpoints" / step)


def test_a_checkpoint_replaced_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was sent back to step 10 saves step 20 again, while the old one is on its way."""
    here, remote = _run(tmp_path)
    _save(here, 20)
    first, gate = _put_waits(monkeypatch, lambda file: file.name == "b.txt")
    remote.follow()
    assert first.wait(10)
    directory = here.new_directory(20)
    files = {name: store.write_text(directory / name, f"{name} 02") for name in ("a.txt", "b.txt")}
    here.commit(20, "full", files, {})  # of the same sizes
    gate.set()
    remote.follow(20)
    remote.finish(10)
    there = _address(tmp_path) / "checkpoints" / "step_00000020"
    verify(there)
    assert (there / "a.txt").read(0, 99) == b"a.txt 02"
    assert "was replaced while it was copied" in caplog.text


def test_a_process_that_was_stopped_for_hours_puts_no_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of one run, the one that started last owns the address, from the moment it starts."""
    here, first = _copied(tmp_path, 10)
    late = []

    def is_late(address: Address) -> bool:
        if found := threading.current_thread() is first._thread and address.name in ("a.txt", "b.txt"):
            late.append(address.name)
        return found

    stopped, gate = _put_waits(monkeypatch, is_late)
    _save(here, 20)
    first.follow(20)
    assert stopped.wait(10)
    second = Remote(_address(tmp_path), here, Retention(last=2))
    second.follow(20)
    second.finish(10)
    gate.set()
    first.finish(10)
    assert late == ["a.txt"], "not b.txt, which the second has put"


@pytest.mark.parametrize("content", [None, b"", b'{"run_id": "on'])
def test_an_address_whose_owners_file_is_lost_or_torn_is_its_runs_all_the_same(
    tmp_path: Path, content: bytes | None
) -> None:
    here, _ = _copied(tmp_path, 10)
    owner = tmp_path / "there" / "run.json"
    owner.unlink() if content is None else owner.write_bytes(content)
    assert _claimed(tmp_path / "new", "auto", str(_address(tmp_path))).run_id == "one"
    with pytest.raises(UserError, match="holds another run, one"):
        _claimed(tmp_path / "another", None, str(_address(tmp_path)))
    restarted = Remote(_address(tmp_path), here, Retention(last=2))
    _save(here, 20)
    restarted.follow(20)
    restarted.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    assert json.loads(owner.read_text())["run_id"] == "one"


def test_a_file_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Address(f"file://{tmp_path}/there/run.json")
    file.write(b"before")

    def full(fs: object, path: str, data: bytes, **options: object) -> None:
        Path(path).write_bytes(data[:2])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.local.LocalFileSystem.pipe_file", full)
        with pytest.raises(UnreachableError, match="No space left"):
            file.write(b"after")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["run.json"]
    assert file.read(0, 99) == b"before"
    file.write(b"after")
    with pytest.raises(FileExistsError):
        file.write(b"again", create=True)
    assert file.read(0, 99) == b"after"


def test_a_checkpoint_that_goes_while_it_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Store(tmp_path, "one")
    for step in (10, 20):
        _save(here, step)
    read = listing.read_manifest

    def just_pruned(directory: Path) -> object:
        if directory.name == "step_00000010":
            with contextlib.suppress(FileNotFoundError):
                directory.rename(tmp_path / ".tmp_gone")
        return read(directory)

    monkeypatch.setattr(listing, "read_manifest", just_pruned)
    assert [path.name for path in Listing(tmp_path, "one").newest_first()] == ["step_00000020"]


def test_what_a_failure_leaves_there_is_deleted_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, remote = _copied(tmp_path, 10)
    put, failed = Address.put, threading.Event()

    def failing(address: Address, file: Path) -> None:
        if address.name == "b.txt" and "_00000020" in str(address):
            failed.set()
            raise UnreachableError("503")
        put(address, file)

    monkeypatch.setattr(Address, "put", failing)
    _save(here, 20)
    remote.follow(20)
    assert failed.wait(10)
    _save(here, 30)
    remote.follow(30)
    remote.finish(10)
    there = tmp_path / "there" / "checkpoints"
    assert sorted(path.name for path in there.iterdir()) == ["step_00000010", "step_00000030"]


def test_a_file_that_arrives_hours_late_is_mixed_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped in mid-upload, and woken after another had gone on, and saved the same step."""
    here, first = _copied(tmp_path, 10)
    stopped, gate = _put_waits(
        monkeypatch, lambda file: threading.current_thread() is first._thread and file.name == "b.txt"
    )
    _save(here, 20)
    first.follow(20)
    assert stopped.wait(10)
    elsewhere, second = _run(tmp_path, "elsewhere")
    directory = elsewhere.new_directory(20)
    files = {name: store.write_text(directory / name, f"{name} 02") for name in ("a.txt", "b.txt")}
    elsewhere.commit(20, "full", files, {})  # of the same sizes
    second.follow(20)
    second.finish(10)
    gate.set()
    first.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020-2"]
    for step in _steps_there(tmp_path):
        verify(_address(tmp_path) / "checkpoints" / step)


def _save_thrice(root: Path, name: str) -> None:
    state, checkpointer = (
        tiny.train_state(),
        tiny.checkpointer(root / name, remote=f"file://{root / 'there'}"),
    )
    tiny.restore(checkpointer, state, "auto")
    for _ in range(3):
        tiny.train(state, 1)
        checkpointer.save(state)
        checkpointer.finish_remote()


def _go_on_with_a_slow_clock(root: Path) -> list[int]:
    """The steps that resumes find after a run went on elsewhere, where the clock is two hours behind."""
    _save_thrice(root, "lost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "time", SimpleNamespace(time=lambda: time.time() - 7200))
        _save_thrice(root, "elsewhere")
    found = []
    for name in ("elsewhere", "empty"):
        state = tiny.train_state(seed=5)
        assert tiny.restore(tiny.checkpointer(root / name, remote=f"file://{root / 'there'}"), state, "auto")
        found.append(state.progress.step)
    return found


@pytest.mark.slow
def test_a_clock_behind_the_lost_machines_makes_no_old_checkpoint_the_newest(tmp_path: Path) -> None:
    assert run_ranks(_go_on_with_a_slow_clock, 1, tmp_path) == [[6, 6]]
    assert _steps_there(tmp_path) == ["step_00000005-2", "step_00000006-2"]
