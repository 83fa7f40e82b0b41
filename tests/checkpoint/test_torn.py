"""A save killed at any point leaves the old checkpoint or the new one intact."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist

from tests.checkpoint import tiny
from tests.ranks import RankFailure, run_ranks
from trainer.checkpoint import manifest, safetensors_files, store
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.errors import UserError

OLD, NEW = 2, 3


class Points:
    """Counts the points of a save where a kill could leave it incomplete, and exits at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.names: list[str] = []

    def reached(self, name: str, half: Callable[[], Any] = lambda: None) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.kill_at:
            half()  # the part of the action that got done
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        write, fsync, remove = manifest.write_hashed, os.fsync, shutil.rmtree
        rename, mkdir = Path.rename, Path.mkdir

        def do_write(path: Path, pieces: Iterable[Any]) -> manifest.FileDigest:
            kind, pieces = "manifest" if path.name == manifest.MANIFEST else "write", list(pieces)
            for number, piece in enumerate(pieces):
                half = bytes(piece)[: len(piece) // 2]
                before = b"".join(pieces[:number])
                self.reached(kind, lambda begun=before + half: path.write_bytes(begun))  # type: ignore[misc]
            return write(path, pieces)

        def do_fsync(descriptor: int) -> None:
            self.reached("fsync")
            fsync(descriptor)

        def do_rename(path: Path, target: Path) -> Path:
            self.reached("prune" if target.name.startswith(".tmp") else "rename")
            return rename(path, target)

        def do_mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
            self.reached("mkdir")
            mkdir(path, *args, **kwargs)

        def do_rmtree(path: Path, **kwargs: Any) -> None:
            self.reached("prune", lambda: next(Path(path).iterdir()).unlink())
            remove(path, **kwargs)

        manifest.write_hashed = safetensors_files.write_hashed = do_write  # type: ignore
        os.fsync = do_fsync  # type: ignore
        shutil.rmtree = do_rmtree  # type: ignore
        Path.rename, Path.mkdir = do_rename, do_mkdir  # type: ignore


def _train_and_save(
    run_dir: Path, last_step: int, kill_rank: int = 0, kill_at: int | None = None
) -> dict[str, Any]:
    """Resume from the newest checkpoint, train to ``last_step`` and save there."""
    state = tiny.train_state(sharded=True)
    checkpointer = tiny.checkpointer(run_dir, format="sharded", keep_last=1)
    tiny.restore(checkpointer, state, "auto")
    tiny.train(state, last_step - state.progress.step)
    points = Points(kill_at if torch_dist.get_rank() == kill_rank else None)
    points.install()
    checkpointer.save(state).wait()
    return {"saved": tiny.everything(state), "points": points.names}


KINDS = ("rename", "write", "manifest", "prune", "fsync", "mkdir")


def _one_of_each_kind(points: list[list[str]]) -> list[tuple[int, int]]:
    """Return pairs (rank, point); benchmarks/torn_saves.py kills at many more points."""
    places = {
        kind: [
            (rank, at) for rank, names in enumerate(points) for at, name in enumerate(names) if name == kind
        ]
        for kind in KINDS
    }
    return [of_kind[len(of_kind) // 2] for of_kind in places.values()]


def _found_by_auto(run_dir: Path) -> OpenCheckpoint:
    """Return the checkpoint that resume=auto chooses after its clean-up."""
    checkpoints = store.Store(run_dir / "checkpoints")
    checkpoints.recover()
    for directory in checkpoints.own():
        with contextlib.suppress(UserError):
            manifest.verify(directory)
            return OpenCheckpoint.open(directory)
    raise AssertionError("neither the old nor the new checkpoint is intact")


def _is_same(source: OpenCheckpoint, state: dict[str, Any]) -> bool:
    tensors = source.read()
    same = all(tensor.equal(tensors[name]) for name, tensor in state["tensors"].items())
    return same and tensors.keys() == state["tensors"].keys() and source.facts["state"] == state["plain"]


@pytest.mark.slow
def test_a_save_killed_at_any_point_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    old = run_ranks(_train_and_save, 2, pristine, OLD)[0]["saved"]
    whole = run_ranks(_train_and_save, 2, shutil.copytree(pristine, tmp_path / "whole", symlinks=True), NEW)
    new = whole[0]["saved"]
    assert not new["tensors"]["model.first.weight"].equal(old["tensors"]["model.first.weight"])
    places = _one_of_each_kind([result["points"] for result in whole])
    outcomes = []
    for number, (rank, at) in enumerate(places):
        run_dir = shutil.copytree(pristine, tmp_path / str(number), symlinks=True)
        with pytest.raises(RankFailure, match=f"rank {rank}: died with exit code -9"):
            run_ranks(_train_and_save, 2, run_dir, NEW, rank, at)
        found = _found_by_auto(run_dir)
        outcomes += [name for name, state in (("old", old), ("new", new)) if _is_same(found, state)]
        leftovers = [
            entry.name for entry in (run_dir / "checkpoints").iterdir() if entry.name.startswith(".")
        ]
        assert leftovers == []
        shutil.rmtree(run_dir)
    assert len(outcomes) == len(places), f"{len(places) - len(outcomes)} mixtures"
    assert set(outcomes) == {"old", "new"}
