"""Saves that fail or are slow: all ranks raise one clear error, and existing checkpoints are unchanged."""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint import manifest
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.finding import saved_settings_of
from trainer.checkpoint.store import Store
from trainer.config import KeepBest
from trainer.errors import RetryableError, UserError

TENSORS = "model-00000-of-00001.safetensors"


def _fill_the_disk(run_dir: Path, sharded: bool, async_: bool) -> dict[str, Any]:
    """Save, then fail to save because the disk is full, then free space and save again."""
    rank = dist.get_rank()
    state = tiny.train_state(sharded)
    checkpointer = tiny.checkpointer(run_dir, async_=async_, state=state)
    tiny.train(state, 1)
    checkpointer.save(state)
    checkpointer.saving.wait()
    assert all(each.daemon for each in threading.enumerate()[1:]), "Python would wait for it at the end"
    saved = tiny.everything(state)
    ballast = run_dir / "ballast"
    if rank == 0:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size - 12288)  # room to begin, not to finish
    tiny.train(state, 1)
    with pytest.raises(RetryableError) as failure:
        checkpointer.save(state)
        checkpointer.saving.wait()
    dist.barrier()
    entries = sorted(entry.name for entry in (run_dir / "checkpoints").iterdir())
    fresh = tiny.train_state(sharded, seed=8)
    assert tiny.restore(tiny.checkpointer(run_dir), fresh, "auto")
    tiny.assert_same(tiny.everything(fresh), saved)
    if rank == 0:
        ballast.unlink()
    dist.barrier()
    tiny.train(state, 1)
    checkpointer.save(state)
    checkpointer.saving.wait()
    return {
        "message": str(failure.value),
        "entries": entries,
        "after": sorted(entry.name for entry in (run_dir / "checkpoints").iterdir()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "async_"), [(False, False), (True, True)])
def test_a_full_disk_leaves_the_previous_checkpoint_intact(
    small_disk: Path, sharded: bool, async_: bool
) -> None:
    results = run_ranks(_fill_the_disk, 2, small_disk, sharded, async_)
    for result in results:
        assert result["message"] == results[0]["message"]
        assert "failed to save the checkpoint of step 2" in result["message"]
        assert "No space left on device" in result["message"]
        assert result["entries"] == ["step_00000001"]
        assert result["after"] == ["step_00000001", "step_00000003"]


def _pass_over(run_dir: Path) -> dict[str, Any]:
    state = tiny.train_state()
    checkpointer = tiny.checkpointer(run_dir, keep_last=5, state=state)
    saved = []
    for _ in range(3):
        tiny.train(state, 1)
        checkpointer.save(state)
        saved.append(tiny.everything(state))
    (run_dir / "checkpoints" / "step_00000003" / "manifest.json").unlink()
    with (run_dir / "checkpoints" / "step_00000002" / TENSORS).open("r+b") as file:
        file.seek(300)
        file.write(b"\xff\xff")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("trainer.checkpoint")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    fresh = tiny.train_state(seed=4)
    other = Checkpointer(
        tiny.settings(),
        run_dir,
        tiny.facts(),
        run_id="tiny",
        num_samples=48,
        config={**tiny.CONFIG, "optim.lr": 0.5, "new": 1},
    )
    assert tiny.restore(other, fresh, "auto")
    tiny.assert_same(tiny.everything(fresh), saved[0])
    with pytest.raises(UserError, match="step_00000002 is damaged"):
        tiny.restore(other, fresh, str(run_dir / "checkpoints" / "step_00000002"))
    with pytest.raises(
        UserError, match="is a run directory, not a checkpoint; give the path of a checkpoint, or run_dir=DIR"
    ):
        tiny.restore(other, fresh, str(run_dir))
    assert not tiny.restore(tiny.checkpointer(run_dir / "empty"), fresh, "auto")
    assert not tiny.restore(other, fresh, None)
    return {"messages": messages}


def test_resume_auto_logs_skipped_checkpoints_and_changed_settings(tmp_path: Path) -> None:
    (result,) = run_ranks(_pass_over, 1, tmp_path)
    text = "\n".join(result["messages"])
    assert "skipping step_00000003" in text and "no manifest.json" in text
    assert "skipping step_00000002" in text and f"sha256 of {TENSORS}" in text
    assert "resumed from" in text and "step_00000001 at step 1" in text
    assert "optim.lr was 0.1 in the checkpoint, and is 0.5 now" in text
    assert "new was not set in the checkpoint, and is 1 now" in text
    # A run without a seed continues with the one that it drew.
    first = tmp_path / "checkpoints" / "step_00000001"
    for resume, seed in (("auto", 0), (str(first), 0), (str(tmp_path / "none"), None)):
        assert saved_settings_of(tmp_path, "tiny", resume).get("seed") == seed


def _all_damaged(run_dir: Path) -> None:
    state = tiny.train_state()
    checkpointer = tiny.checkpointer(run_dir, keep_best=KeepBest("eval/loss", "min"), state=state)
    checkpointer.save(state)
    (run_dir / "checkpoints" / "step_00000000" / TENSORS).write_bytes(b"")
    with pytest.raises(
        UserError, match=r"none of the 1 checkpoints in .* is intact.* set another run_dir to start"
    ):
        tiny.restore(tiny.checkpointer(run_dir), state, "auto")
    (run_dir / "away").mkdir()
    (run_dir / "away" / "checkpoints").symlink_to(run_dir / "not mounted")
    with pytest.raises(UserError, match="is a file or a broken link; check that its disk is mounted"):
        tiny.checkpointer(run_dir / "away").open("auto")


def test_resume_auto_starts_no_new_run_if_checkpoints_are_damaged_or_the_disk_is_missing(
    tmp_path: Path,
) -> None:
    run_ranks(_all_damaged, 1, tmp_path)


def _delete_slowly(run_dir: Path) -> list[list[str]]:
    """Return the checkpoints after a save whose deletions have not started, and after they are done."""
    may_begin, delete, found = threading.Event(), Store._delete, []

    def wait_and_delete(*arguments: Any) -> None:
        may_begin.wait(60)
        delete(*arguments)

    state = tiny.train_state()
    checkpointer = tiny.checkpointer(run_dir, keep_last=1, state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_delete", wait_and_delete)
        for _ in range(2):
            tiny.train(state, 1)
            checkpointer.save(state)
        found.append(sorted(entry.name for entry in (run_dir / "checkpoints").iterdir()))
        may_begin.set()
        checkpointer.saving.wait()
    return [*found, sorted(entry.name for entry in (run_dir / "checkpoints").iterdir())]


def test_training_does_not_wait_until_older_checkpoints_are_deleted(tmp_path: Path) -> None:
    (found,) = run_ranks(_delete_slowly, 1, tmp_path)
    assert found == [["step_00000001", "step_00000002"], ["step_00000002"]]


def _another_run_in_the_same_place(run_dir: Path) -> dict[str, list[str]]:
    """Let two runs save in one directory, while the clock runs backwards.

    Runs one and two save steps 2 and 4; then two is resumed and saves step 5.
    """
    found = {}
    for clock, (run_id, resume) in enumerate([("one", None), ("two", None), ("two", "auto")]):
        time.time = lambda clock=clock: 1e9 - clock  # type: ignore[assignment, misc]
        state = tiny.train_state(seed=clock)
        checkpointer = tiny.checkpointer(run_dir, keep_last=1, run_id=run_id)
        assert tiny.restore(checkpointer, state, resume) == (resume is not None)
        for steps in (2, 2) if resume is None else (1,):
            tiny.train(state, steps)
            checkpointer.save(state).wait()
        found[f"{run_id} {resume}"] = sorted(entry.name for entry in (run_dir / "checkpoints").iterdir())
    return found


def test_checkpoints_of_another_run_are_neither_pruned_nor_replaced_nor_resumed(tmp_path: Path) -> None:
    (found,) = run_ranks(_another_run_in_the_same_place, 1, tmp_path)
    assert found == {
        "one None": ["step_00000004"],
        "two None": ["step_00000004", "step_00000004-2"],
        "two auto": ["step_00000004", "step_00000005"],
    }
    assert manifest.read_manifest(tmp_path / "checkpoints" / "step_00000004").run_id == "one"


def _save_on_separate_disks(root: Path) -> str:
    state = tiny.train_state(sharded=True)
    checkpointer = tiny.checkpointer(root / str(dist.get_rank()), state=state)
    with pytest.raises(UserError) as refused:
        checkpointer.check(state)
    return str(refused.value)


def test_ranks_without_a_shared_disk_are_refused_before_the_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(_save_on_separate_disks, 2, tmp_path)
    assert first == second
    assert (
        first.startswith("rank 1: ") and "set run_dir to a directory on a file system that all hosts" in first
    )
