"""The directories of a run: which are kept, which are deleted, and which are never touched."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint import store as store_module
from trainer.checkpoint.hashing import write_text
from trainer.checkpoint.listing import Retention
from trainer.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    manifest_text,
    read_manifest,
    step_in_name,
    verify,
)
from trainer.checkpoint.store import Store
from trainer.errors import UserError


def _save(store: Store, step: int, **metrics: float) -> Path:
    directory = store.new_directory(step)
    return store.commit(step, "full", {"a.txt": write_text(directory / "a.txt", f"step {step}")}, metrics)


def _steps(store: Store) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in store.directories()]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(last=2), [50, 60]),
        (Retention(last=1, every=20), [20, 40, 60]),
        (Retention(last=1, best=("loss", "min")), [30, 60]),
        (Retention(last=1, best=("loss", "max")), [10, 60]),
        (Retention(last=1, best=("accuracy", "max")), [60]),
        (Retention(last=9), [10, 20, 30, 40, 50, 60]),
    ],
)
def test_keeps_the_last_the_best_and_every_nth(tmp_path: Path, retention: Retention, kept: list[int]) -> None:
    store = Store(tmp_path, "mine")
    for step, loss in ((10, 5.0), (20, 2.0), (30, 1.0), (40, 3.0)):
        _save(store, step, loss=loss)
    _save(store, 50)
    _save(store, 60)
    gone = store.prune(retention)
    assert _steps(store) == kept
    assert len(gone) == 6 - len(kept)
    assert verify(tmp_path / "latest").step == 60
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_checkpoints_of_another_run_neither_count_nor_go(tmp_path: Path) -> None:
    other, ours = Store(tmp_path, "other"), Store(tmp_path, "ours")
    for step in (1, 2, 3):
        _save(other, step)
        _save(ours, step * 10)
        _save(other, step + 100)
    ours.prune(Retention(last=1))
    assert _steps(ours) == [1, 2, 3, 30, 101, 102, 103]
    assert [path.name for path in ours.newest_first()] == ["step_00000030"]
    assert [path.name[-3:] for path in ours.of_others()] == ["001", "002", "003", "101", "102", "103"]


def test_prunes_nothing_but_its_own(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    other = Store(outside, "mine")
    _save(other, 1)
    store = Store(tmp_path / "checkpoints", "mine")
    for step in range(3):
        _save(store, step)
    (store.root / "step_00000007").symlink_to(outside / "step_00000001")
    (store.root / "step_mine").mkdir()
    (store.root / "notes.txt").write_text("keep")
    (store.root / "step_00000009").mkdir()  # a user's: it has no manifest
    store.prune(Retention(last=1))
    assert _steps(other) == [1] and verify(outside / "step_00000001").step == 1
    names = {entry.name for entry in store.root.iterdir()}
    assert names == {"step_00000002", "step_00000007", "step_mine", "notes.txt", "step_00000009", "latest"}


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path, dangling: bool) -> None:
    target = _save(Store(tmp_path / "outside", "mine"), 1)
    store = Store(tmp_path / "checkpoints", "mine")
    store.root.mkdir()
    store.path(2).symlink_to(tmp_path / "nowhere" if dangling else target)
    assert not _save(store, 2).is_symlink()
    assert verify(target).step == 1
    assert {entry.name for entry in store.root.iterdir()} == {"step_00000002", "latest"}


def test_newest_is_the_last_saved_not_the_highest_step(tmp_path: Path) -> None:
    """After a run was sent back to step 5, its old step 10 is an abandoned future."""
    store = Store(tmp_path, "mine")
    for step in (5, 10, 6):
        _save(store, step)
    assert [path.name[-2:] for path in store.newest_first()] == ["06", "10", "05"]
    _save(store, 10)
    assert [path.name[-2:] for path in store.newest_first()] == ["10", "06", "05"]
    assert (tmp_path / "step_00000010" / "a.txt").read_text() == "step 10"


def test_each_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address each is a request or two, at every save."""
    store, read = Store(tmp_path, "one"), []
    for step in (10, 20, 30):
        _save(store, step)

    def noted(directory: Path) -> Manifest:
        read.append(directory.name)
        return read_manifest(directory)

    monkeypatch.setattr("trainer.checkpoint.listing.read_manifest", noted)
    assert [path.name for path in store.own()] == ["step_00000030", "step_00000020", "step_00000010"]
    assert sorted(read) == ["step_00000010", "step_00000020", "step_00000030"]


def test_a_clock_set_back_does_not_make_the_newest_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "mine")
    _save(store, 1)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for step in (2, 3):
        _save(store, step)
        store.prune(Retention(last=1))
        assert _steps(store) == [step]


def test_cleans_up_after_a_kill(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    _save(store, 1)
    (store.new_directory(2) / "half").write_text("...")
    _save(store, 3).rename(tmp_path / ".replaced_step_00000003")  # killed between the two renames
    (tmp_path / ".tmp_latest").symlink_to("step_00000001")
    store.recover()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000003"]
    assert verify(tmp_path / "step_00000003").step == 3


def test_latest_is_put_right_after_a_kill_between_a_checkpoints_rename_and_it(tmp_path: Path) -> None:
    """A run killed there in its last save would leave it forever: resumed, it does not save again."""
    store, other = Store(tmp_path, "ours"), Store(tmp_path, "other")
    for step in (1, 2):
        _save(store, step)
    for before in ("step_00000001", None):
        (tmp_path / "latest").unlink()
        if before is not None:
            (tmp_path / "latest").symlink_to(before)
        store.recover()
        assert (tmp_path / "latest").readlink() == Path("step_00000002")
    _save(other, 3)
    Store(tmp_path, "a third").recover()
    assert (tmp_path / "latest").readlink() == Path("step_00000003"), "it has none to point at"


def test_refuses_to_commit_what_it_does_not_see(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    directory = store.new_directory(1)
    digest = write_text(directory / "a.txt", "a")
    with pytest.raises(OSError, match="is run_dir on a file system that all hosts share"):
        store.commit(1, "sharded", {"a.txt": digest, "from_another_host": digest}, {})


def test_a_part_of_the_files_can_be_verified_by_each_rank(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    directory = store.new_directory(1)
    files = {name: write_text(directory / name, name) for name in "abcd"}
    final = store.commit(1, "sharded", files, {})
    (final / "c").write_text("C")
    verify(final, 1, 2)
    with pytest.raises(UserError, match="sha256 of c"):
        verify(final, 0, 2)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "..", "", "a\\b", "manifest.json"])
def test_refuses_a_manifest_that_climbs_out(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path, "mine")
    directory = store.new_directory(1)
    digest = write_text(directory / "a.txt", "a")
    final = store.commit(1, "full", {"a.txt": digest}, {})
    (final / MANIFEST).write_text(manifest_text(Manifest("full", 1, 0.0, {name: digest}, run_id="mine")))
    with pytest.raises(UserError, match="only plain file names beside it"):
        read_manifest(final)


def test_a_run_copied_with_its_links_followed_goes_on(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    saved = _save(store, 1)
    for copied in (1, 2):
        (tmp_path / "latest").unlink()
        shutil.copytree(saved, tmp_path / "latest")
        newest = _save(store, 1 + copied)
        assert (tmp_path / "latest").resolve() == newest
        assert read_manifest(tmp_path / f"latest-{1 + copied}").step == 1, "nothing is lost"


def test_a_file_system_without_links_has_no_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as vfat says it

    monkeypatch.setattr(Path, "symlink_to", refused)
    store = Store(tmp_path, "mine")
    _save(store, 1)
    assert (_steps(store), (tmp_path / "latest").exists()) == ([1], False)


# ---- what cannot be deleted, moved or linked


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(store_module.log, "warning", lambda text, *args: told.append(text % args))
    return told


def _hold(patch: pytest.MonkeyPatch, how: str, held: str) -> None:
    """Let ``how`` fail for paths that contain ``held``, as the kernel does: immutable, busy, open on NFS."""
    error = {"rename": errno.EPERM, "unlink": errno.EBUSY, "rmdir": errno.ENOTEMPTY}[how]
    owner = Path if how == "rename" else os
    act = getattr(owner, how)

    def fail(path: Any, *args: Any, **kwargs: Any) -> Any:
        opened = kwargs.get("dir_fd")
        whole = str(path) if opened is None else f"{Path(f'/proc/self/fd/{opened}').readlink()}/{path}"
        if held in whole:
            raise OSError(error, os.strerror(error), str(path))
        return act(path, *args, **kwargs)

    patch.setattr(owner, how, fail)


@pytest.mark.parametrize("how", ["rename", "unlink", "rmdir"])
def test_a_checkpoint_that_cannot_be_deleted_is_named_once_and_goes_when_it_can(
    tmp_path: Path, warnings: list[str], how: str
) -> None:
    store = Store(tmp_path, "mine")
    _save(store, 1)
    with pytest.MonkeyPatch.context() as patch:
        _hold(patch, how, "step_00000001")
        for step in (2, 3, 4):
            _save(store, step)
            store.prune(Retention(last=1))
            store.recover()
        assert _steps(store) == ([1, 4] if how == "rename" else [4])
        (said,) = warnings
        assert "step_00000001 cannot be deleted" in said
        assert any(why in said for why in ("not permitted", "busy", "not empty"))
    _save(store, 5)
    store.prune(Retention(last=1))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000005"]


def test_what_a_failed_deletion_left_does_not_hold_up_the_same_step(
    tmp_path: Path, warnings: list[str]
) -> None:
    store = Store(tmp_path, "mine")
    with pytest.MonkeyPatch.context() as patch:
        _hold(patch, "rmdir", ".tmp_step_00000001")
        for step in (1, 2, 1, 2, 1):
            _save(store, step)
            store.prune(Retention(last=1))
            assert _steps(store) == [step]
            assert verify(tmp_path / "latest").step == step
    store.recover()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_a_checkpoint_that_cannot_be_replaced_has_the_new_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    store = Store(tmp_path, "mine")
    for step in (1, 10):
        _save(store, step)
    _hold(monkeypatch, "rename", str(tmp_path / "step_00000010"))
    saved = _save(store, 10)
    assert (saved.name, verify(saved).step, step_in_name(saved)) == ("step_00000010-2", 10, 10)
    assert store.newest_first()[0] == saved == (tmp_path / "latest").resolve()
    assert ["cannot be replaced: [Errno 1]" in said for said in warnings] == [True]
    store.recover()
    assert [path.name for path in store.directories()] == [
        "step_00000001",
        "step_00000010",
        "step_00000010-2",
    ]


def test_another_runs_checkpoint_is_put_aside_twice(tmp_path: Path, warnings: list[str]) -> None:
    for owner in ("one", "two", "one", "two"):
        _save(Store(tmp_path, owner), 1)
    names = [f"step_00000001{end}" for end in ("", ".of_one", ".of_one-2", ".of_two")]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == names


@pytest.mark.parametrize("how", ["symlink_to", "replace"])
def test_a_latest_that_cannot_be_linked_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], how: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, how, refused)
    store = Store(tmp_path, "mine")
    for step in (1, 2):
        _save(store, step)
        store.recover()
    assert _steps(store) == [1, 2]
    (said,) = warnings
    assert "latest cannot be pointed at the newest checkpoint" in said and "Permission denied" in said


def test_a_save_that_is_overtaken_is_the_older_one(tmp_path: Path) -> None:
    """One in the background may be complete only after a later one, made at a fault."""
    slow, quick = Store(tmp_path, "run"), Store(tmp_path, "run", shared=True)
    directory = slow.new_directory(5)
    _save(quick, 7)
    slow.commit(5, "full", {"a.txt": write_text(directory / "a.txt", "step 5")}, {})
    assert [path.name for path in slow.newest_first()] == ["step_00000007", "step_00000005"]


def test_savers_at_a_fault_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()

    def second() -> None:
        with Store(tmp_path, "run").turn():
            entered.set()

    thread = threading.Thread(target=second)
    with Store(tmp_path, "run").turn():
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join()
    monkeypatch.setattr(store_module, "_TURN_S", 0.1)  # the other may be stopped
    with Store(tmp_path, "run").turn(), Store(tmp_path, "run").turn():
        pass
