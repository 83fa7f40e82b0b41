"""The checkpoints of a run directory: which are kept, which are deleted, and which are never changed."""

import errno
from pathlib import Path

import pytest

from tests.checkpoint.tiny import settings
from trainer.checkpoint import store as store_module
from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.manifest import Manifest, read_manifest, verify, write_text
from trainer.checkpoint.store import Store
from trainer.config import CheckpointConfig, KeepBest
from trainer.errors import UserError

NOT_EVALUATED = Evaluations(Path())


def _save(store: Store, step: int, branch: str = "trunk") -> Path:
    directory = store.new_directory(step)
    return store.commit(step, "full", {"a.txt": write_text(directory / "a.txt", f"step {step}")}, branch)


def _steps(store: Store) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in store.directories()]


@pytest.mark.parametrize(
    ("keeps", "kept"),
    [
        (settings(keep_last=1, keep_every=20), [20, 40, 60]),
        (settings(keep_last=1, keep_best=KeepBest("loss", "min")), [30, 60]),
        (settings(keep_last=1, keep_best=KeepBest("loss", "max")), [10, 60]),
        (settings(keep_last=9, keep_best=KeepBest("accuracy", "max")), [10, 20, 30, 40, 50, 60]),
    ],
)
def test_keeps_the_last_the_best_and_every_nth(
    tmp_path: Path, keeps: CheckpointConfig, kept: list[int]
) -> None:
    store, evaluations = Store(tmp_path / "checkpoints", "mine"), Evaluations(tmp_path)
    for step, loss in ((10, 5.0), (20, 2.0), (30, 1.0), (40, 3.0), (50, float("nan"))):
        _save(store, step)
        evaluations.add(State("trunk", step), {"loss": loss})
    _save(store, 60)
    store.prune(keeps, evaluations)
    assert _steps(store) == kept
    assert not [entry for entry in store.root.iterdir() if entry.name.startswith(".")]


def test_prunes_only_its_own_checkpoints(tmp_path: Path) -> None:
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
    store.prune(settings(keep_last=1), NOT_EVALUATED)
    assert _steps(other) == [1] and verify(outside / "step_00000001").step == 1
    names = {entry.name for entry in store.root.iterdir()}
    assert names == {"step_00000002", "step_00000007", "step_mine", "notes.txt", "step_00000009"}


def test_newest_is_the_last_saved_not_the_highest_step(tmp_path: Path) -> None:
    """After a run was resumed from step 5, its earlier step 10 is abandoned."""
    store = Store(tmp_path, "mine")
    for step in (5, 10, 6):
        _save(store, step)
    assert [path.name[-2:] for path in store.own()] == ["06", "10", "05"]
    _save(store, 10)
    store.prune(settings(keep_last=3), NOT_EVALUATED)
    assert [path.name for path in store.own()] == [
        "step_00000010-2",
        "step_00000006",
        "step_00000005",
    ]


def test_cleans_up_after_a_kill(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    _save(store, 1)
    (store.new_directory(2) / "half").write_text("...")
    _save(store, 3)
    store.recover()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]
    assert verify(tmp_path / "step_00000003").step == 3


def test_refuses_to_commit_missing_files(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    directory = store.new_directory(1)
    digest = write_text(directory / "a.txt", "a")
    with pytest.raises(UserError, match="set run_dir to a directory on a file system that all hosts share"):
        store.commit(1, "sharded", {"a.txt": digest, "from_another_host": digest}, "")


def test_a_part_of_the_files_can_be_verified_by_each_rank(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    directory = store.new_directory(1)
    files = {name: write_text(directory / name, name) for name in "abcd"}
    final = store.commit(1, "sharded", files, "")
    (final / "c").write_text("C")
    for reader in (0, 1, 3):
        verify(final, reader, 4)
    with pytest.raises(UserError, match="sha256 of c"):
        verify(final, 2, 4)


# ---- what cannot be deleted, moved or linked


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(store_module.log, "warning", lambda text, *args: messages.append(text % args))
    return messages


def test_a_checkpoint_that_cannot_be_deleted_is_reported_once_and_retried(
    tmp_path: Path, warnings: list[str]
) -> None:
    """It may be immutable, busy, or open on NFS."""
    store, rename = Store(tmp_path, "mine"), Path.rename
    _save(store, 1)

    def held(path: Path, target: Path) -> Path:
        if path.name == "step_00000001":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", held)
        for step in (2, 3, 4):
            _save(store, step)
            store.prune(settings(keep_last=1), NOT_EVALUATED)
            store.recover()
        assert _steps(store) == [1, 4]
        (said,) = warnings
        assert "failed to delete" in said and "step_00000001" in said and "not permitted" in said
    _save(store, 5)
    store.prune(settings(keep_last=1), NOT_EVALUATED)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_00000005"]


def test_an_overtaken_save_counts_as_the_older_one(tmp_path: Path) -> None:
    """A background save may finish after a later save on failure."""
    slow, quick = Store(tmp_path, "run"), Store(tmp_path, "run", shared=True)
    directory = slow.new_directory(5)
    _save(quick, 7)
    slow.commit(5, "full", {"a.txt": write_text(directory / "a.txt", "step 5")}, "")
    assert [path.name for path in slow.own()] == ["step_00000007", "step_00000005"]


def test_a_save_parses_no_kept_manifest_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of this process are never parsed, and those of previous ones once."""
    parsed: list[str] = []

    def counted(directory: Path) -> Manifest:
        parsed.append(directory.name)
        return read_manifest(directory)

    monkeypatch.setattr("trainer.checkpoint.listing.read_manifest", counted)
    before = Store(tmp_path, "one")
    for step in (1, 2, 3):
        _save(before, step)
        before.prune(settings(keep_last=3), NOT_EVALUATED)
    assert parsed == []
    store = Store(tmp_path, "one")
    for step in (4, 5):
        _save(store, step)
        store.prune(settings(keep_last=3), NOT_EVALUATED)
    assert sorted(parsed) == ["step_00000001", "step_00000002", "step_00000003"]
