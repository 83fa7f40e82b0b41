"""checkpoint.remote with a store that fails, has other writers, or loses files: no data is lost."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.failing_store import FailingStore
from tests.checkpoint.test_remote import _claimed, _save, _steps_there, _wait, remote_of
from trainer.checkpoint.listing import all_checkpoints
from trainer.checkpoint.manifest import verify, write_text
from trainer.checkpoint.open_checkpoint import first_intact
from trainer.checkpoint.remote import Remote
from trainer.checkpoint.store import Store
from trainer.distributed.agreement import Agreement
from trainer.errors import NoAccessError, UserError
from trainer.files.address import Address, UnreachableError

QUESTIONS = (("info", "checkpoints"), ("ls", "checkpoints"), ("info", "20/manifest.json"))
FORBIDDEN = PermissionError("403 Forbidden")
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
    return here, remote_of(_address(root), here)


def _copied(root: Path, *steps: int) -> tuple[Store, Remote]:
    here, remote = _run(root)
    for step in steps:
        _save(here, step)
        remote.follow(step)
        remote.finish(10)
    return here, remote


@pytest.mark.parametrize("error", [FailingStore.error, FORBIDDEN], ids=str)
@pytest.mark.parametrize("call", [*QUESTIONS, *READS])
def test_the_newest_is_found_though_a_call_fails_three_times(
    tmp_path: Path, call: tuple[str, str], error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copied(tmp_path, 10, 20)
    elsewhere, remote = _run(tmp_path, "elsewhere")
    FailingStore.failures[call] = 3
    monkeypatch.setattr(FailingStore, "error", error)
    newest = all_checkpoints(elsewhere, str(remote._address))[0].path
    verify(newest)
    assert newest.name == "step_00000020"
    if call != ("info", "20/manifest.json"):  # what is listed is not asked for
        assert FailingStore.failures[call] == 0


@pytest.mark.parametrize(
    "call", [("info", "checkpoints"), ("ls", "checkpoints"), ("cat_file", "20/manifest")]
)
def test_an_unreachable_store_is_not_taken_for_an_empty_one(
    tmp_path: Path, call: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise resume=auto would silently start at step 0 or continue from an older step."""
    here, _ = _copied(tmp_path, 10, 20)
    elsewhere, remote = _run(tmp_path, "elsewhere")
    FailingStore.failures[call] = 1000
    with pytest.raises(UnreachableError, match="cannot be reached: OSError: 500"):
        all_checkpoints(elsewhere, str(remote._address))
    assert [each.path.name[-2:] for each in all_checkpoints(here, str(remote._address))] == ["20", "10"]
    assert "500 Internal Server Error; using only the checkpoints in" in caplog.text


@pytest.mark.parametrize(
    "call", [("cat_file", "20/manifest"), ("info", "20/a.txt"), ("cat_file", "20/a.txt")]
)
def test_denied_access_is_not_taken_for_damage(
    tmp_path: Path, call: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a temporary denial of access would make resume=auto continue from an older checkpoint."""
    _copied(tmp_path, 10, 20)
    elsewhere, remote = _run(tmp_path, "elsewhere")
    monkeypatch.setattr(FailingStore, "error", FORBIDDEN)
    FailingStore.failures[call] = 1000
    with pytest.raises(NoAccessError, match="cannot be reached: PermissionError: 403"):
        first_intact([each.path for each in all_checkpoints(elsewhere, str(remote._address))], Agreement())


def test_a_store_that_does_not_answer_loses_no_checkpoint(tmp_path: Path) -> None:
    here, _ = _copied(tmp_path, 10, 20)
    FailingStore.failures["info", "20/manifest.json"] = 1000
    restarted = remote_of(_address(tmp_path), here)
    restarted.follow()
    _wait(lambda: FailingStore.failures["info", "20/manifest.json"] < 990)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    FailingStore.failures.clear()
    restarted.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    for step in _steps_there(tmp_path):
        verify(_address(tmp_path) / "checkpoints" / step)


@pytest.mark.parametrize("content", [None, b'{"run_id": "on'])
def test_an_address_whose_run_json_is_lost_or_damaged_still_belongs_to_its_run(
    tmp_path: Path, content: bytes | None
) -> None:
    here, _ = _copied(tmp_path, 10)
    owner = tmp_path / "there" / "run.json"
    owner.unlink() if content is None else owner.write_bytes(content)
    assert _claimed(tmp_path / "new", "auto", str(_address(tmp_path))).run_id == "one"
    with pytest.raises(UserError, match="already contains a different run, one"):
        _claimed(tmp_path / "another", None, str(_address(tmp_path)))
    restarted = remote_of(_address(tmp_path), here)
    _save(here, 20)
    restarted.follow(20)
    restarted.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020"]
    assert json.loads(owner.read_text())["run_id"] == "one"


def test_a_file_that_arrives_hours_late_changes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was suspended during the upload, and woken after another launch had saved the same step."""
    here, first = _copied(tmp_path, 10)
    put, stopped, gate = Address.put, threading.Event(), threading.Event()

    def waiting(address: Address, file: Path) -> None:
        if address.name == "a.txt" and not stopped.is_set():
            stopped.set()
            assert gate.wait(20)
        put(address, file)

    monkeypatch.setattr(Address, "put", waiting)
    _save(here, 20)
    first.follow(20)
    assert stopped.wait(10)
    elsewhere, second = _run(tmp_path, "elsewhere")
    directory = elsewhere.new_directory(20)
    files = {name: write_text(directory / name, f"{name} 02") for name in ("a.txt", "b.txt")}
    elsewhere.commit(20, "full", files, "")  # of the same sizes
    second.follow(20)
    second.finish(10)
    gate.set()
    first.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020-2"]
    for step in _steps_there(tmp_path):
        verify(_address(tmp_path) / "checkpoints" / step)
    late = tmp_path / "there" / "checkpoints" / "step_00000020"
    assert [path.name for path in late.iterdir()] == ["a.txt"], "it puts no further file"


def test_an_interrupted_upload_is_not_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a run that lost its machine during the first upload could never resume."""
    _copied(tmp_path, 10)
    (tmp_path / "there/checkpoints/step_00000010/manifest.json").unlink()
    elsewhere, remote = _run(tmp_path, "elsewhere")
    assert all_checkpoints(elsewhere, str(remote._address)) == []
    assert "step_00000010: its upload was never completed" in caplog.text
