"""Saves on failure: a run without periodic checkpoints loses no step, and ends like an uninterrupted run."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.failure_parts import inject
from tests.failures.test_ends import TINY
from tests.programs import Ended, finish_ranks
from tests.ranks import run_ranks
from tests.runs import train
from trainer.checkpoint.manifest import read_manifest
from trainer.failures.diagnosis import Failure, Observed
from trainer.failures.heartbeat import Heartbeat, Records
from trainer.failures.save_on_failure import SaveOnFailure, savers, saving_host
from trainer.guards.kept_buffers import KeptBuffers

RUN = (*TINY, "checkpoint.every_epochs=null", "resume=auto", "distributed.timeout_s=20")


def start(world_size: int, run_dir: Path, *overrides: str, **env: str) -> list[Ended]:
    return finish_ranks(world_size, "train.py", *RUN, f"run_dir={run_dir}", *overrides, env=env)


def hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*") if not path.is_symlink())


def message(run_dir: Path) -> str:
    return str(json.loads((run_dir / "failure.json").read_text())["message"])


MODELS = {1: ("model._target_=tests.user_parts.CountsPasses",), 2: ()}
_hashes: dict[Any, str] = {}


def uninterrupted(world_size: int, folder: Path, *overrides: str) -> str:
    if (world_size, overrides) not in _hashes:
        ranks = start(world_size, folder / "uninterrupted", *overrides)
        stacks = [file.read_text() for file in (folder / "uninterrupted" / "stacks").glob("*")]
        assert [rank.code for rank in ranks] == [0] * world_size, "\n".join([*map(str, ranks), *stacks])
        _hashes[world_size, overrides] = hash_of(folder / "uninterrupted")
    return _hashes[world_size, overrides]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "how", "saver"),
    [
        pytest.param(2, inject("kill", 0, 8, "optimizer"), 1, id="rank 0 before the update"),
        pytest.param(2, inject("kill", 1, 8, "update"), 0, id="rank 1 within the update"),
        pytest.param(1, inject("raise", 0, 8), 0, id="the only one raises"),
        pytest.param(2, inject("stop", 1, 8), 0, id="rank 1 is stopped"),
    ],
)
def test_no_step_is_lost(world_size: int, how: tuple[str, ...], saver: int, tmp_path: Path) -> None:
    """With one rank, the model has extra state."""
    run_dir, model = tmp_path / "run", MODELS[world_size]
    deadline = ("distributed.timeout_s=4",) if "'stop'" in str(how) else ()
    ended = start(world_size, run_dir, *model, *how, *deadline)
    assert 0 not in [rank.code for rank in ended], ended
    # A survivor may or may not have finished the step of the failure.
    wanted = {"step_00000007", "step_00000008"}
    found = checkpoints(run_dir)
    assert len(found) == 1 and found[0] in wanted, (found, ended)
    words = f"step {int(found[0][5:])} was saved by rank {saver}"
    assert words in message(run_dir)
    # A single rank prints it when its interpreter exits, which a forked process does not do.
    assert world_size == 1 or any(words in rank.output for rank in ended), ended
    again = start(world_size, run_dir, *model)
    assert [rank.code for rank in again] == [0] * world_size, again
    assert f"{found[0]} at step" in again[0].output
    assert hash_of(run_dir) == uninterrupted(world_size, tmp_path, *model)


@pytest.mark.slow
def test_the_verified_step_is_recorded_without_an_earlier_save(tmp_path: Path) -> None:
    exact = ("strategy=ddp", "train.exact=2", "train.verify_every=5")
    start(2, tmp_path, *exact, *inject("kill", 1, 8, "optimizer"))
    [saved] = (tmp_path / "checkpoints").iterdir()
    assert read_manifest(saved).verified == 5


@pytest.mark.slow
def test_weights_that_a_forward_pass_changes_are_not_saved(tmp_path: Path) -> None:
    start(2, tmp_path, "model._target_=tests.user_parts.Decays", *inject("kill", 1, 8, "backward"))
    assert checkpoints(tmp_path) == []
    assert "no step was saved: a forward pass changes layers.0.weight" in message(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"), reason="needs torch 2.14")
def test_the_last_collectives_are_written_next_to_the_stacks(tmp_path: Path) -> None:
    start(3, tmp_path, "comm=native", *inject("kill", 1, 8, "backward"), TORCH_FR_BUFFER_SIZE="50")
    for rank in (0, 2):  # either of them may write the report
        kept = json.loads((tmp_path / f"stacks/rank{rank}.collectives.json").read_text())["entries"]
        assert len(kept) > 8 and "reduce" in kept[-1]["profiling_name"], kept


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(1, "optimizer"), (0, "data")])
def test_running_statistics_are_those_of_rank_0(rank: int, phase: str, tmp_path: Path) -> None:
    """From step 7: rank 0 has finished the forward pass of step 8, or has died before it."""
    normed = ("model._target_=tests.user_parts.Normed",)
    run_dir = tmp_path / "run"
    start(2, run_dir, *normed, *inject("kill", rank, 8, phase))
    again = start(2, run_dir, *normed)
    assert "resumed from" in again[0].output, message(run_dir)
    assert hash_of(run_dir) == uninterrupted(2, tmp_path, *normed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy=fsdp", *inject("kill", 1, 8)), "no step was saved: each rank has only a shard"),
        (("checkpoint.on_failure=false", *inject("kill", 1, 8)), ""),
    ],
    ids=["shards", "off"],
)
def test_nothing_is_saved(overrides: tuple[str, ...], words: str, tmp_path: Path) -> None:
    start(2, tmp_path, *overrides)
    assert checkpoints(tmp_path) == []
    assert words in message(tmp_path) and (bool(words) or "saved:" not in message(tmp_path))


def on_a_full_disk(run_dir: Path) -> str:
    from trainer.checkpoint import writing

    write_text = writing.write_text

    def full(*arguments: Any) -> Any:
        if threading.current_thread().name == "save on failure":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(*arguments)

    writing.write_text = full
    with pytest.raises(RuntimeError, match="raise, injected"):
        train(*RUN, f"run_dir={run_dir}", "checkpoint.every_steps=3", *inject("raise", 0, 8))
    return message(run_dir)


@pytest.mark.slow
def test_on_a_full_disk_the_previous_checkpoint_is_kept(tmp_path: Path) -> None:
    (said,) = run_ranks(on_a_full_disk, 1, tmp_path, init=False)
    assert said.endswith("no step was saved: OSError: [Errno 28] No space left on device")
    assert checkpoints(tmp_path) == ["step_00000003", "step_00000006"]


def rank(number: int, finished: int, **more: Any) -> Observed:
    return Observed(number, host=number // 2, hostname="h", pid=number, finished=finished, **more)


def of(ranks: list[Observed], blamed: list[int], own: int | None = None) -> list[int]:
    return [rank.rank for rank in savers(ranks, blamed, own)]


def test_the_largest_step_is_saved_preferably_on_the_host_of_rank_0() -> None:
    four = [rank(0, 7), rank(1, 8), rank(2, 8), rank(3, 8)]
    assert (of(four, [3]), saving_host(four, [3])) == ([1, 2, 0, 3], 0)
    assert of([rank(0, 8, state="dead"), rank(1, 8)], [0]) == [1]
    assert of([rank(0, 8, status=1), rank(1, 8, status=1, symptom=True)], [0]) == [1]
    assert of([rank(0, 8, heard_s=3.0), rank(1, 8, asleep_s=4.0), rank(2, 7)], []) == [2]
    assert of([rank(0, 8, status=1), rank(1, 8, state="stopped")], [0], own=0) == [0]
    assert saving_host(four, [0, 1]) == 1
    assert saving_host([rank(0, 8, state="dead")], []) is None


def test_a_host_whose_last_report_is_from_the_set_up_may_save() -> None:
    """Hosts report every 10 s while all is well, so other hosts do not know the steps finished since."""
    ranks = [rank(0, 8, state="dead"), rank(1, 8, status=1), rank(2, 0), rank(3, 0)]
    assert saving_host(ranks, [0]) == 1


class Here:
    """A stand-in for the `Neighbour` of rank `number`, with the notes `said`."""

    def __init__(self, number: int, **said: Any) -> None:
        self.records: Any = self
        self.died_at_ns: int | None = None
        self.member = self.seen = rank(number, 8)
        self._said = said

    def observe(self) -> Observed:
        return self.seen

    def look_for_death(self) -> bool:
        return self.died_at_ns is not None

    def notes(self) -> dict[str, Any]:
        return self._said


class Kept:
    """A stand-in for a last step, 8, that can be saved immediately."""

    def freeze(self, failed: bool) -> int:
        return 8

    def save(self) -> bool:
        return True


@pytest.mark.parametrize("said", [{}, {"outcome": "no step was saved: it may not", "is_saved": False}])
def test_if_the_chosen_rank_dies_or_cannot_save_the_leader_saves(said: dict[str, Any]) -> None:
    heartbeat, own, other = Heartbeat(), Here(0), Here(1, **said)
    own.records = Records(heartbeat._memory)
    own.seen = rank(0, 7)
    other.died_at_ns = None if said else 1
    heartbeat.step = 9
    save = SaveOnFailure(heartbeat, 0, {0: own, 1: other})  # type: ignore[dict-item]
    save.last_step = Kept()
    words = save.lead(Failure((2,), "died", 1, "", saving_host=0), lambda seconds: None)
    assert words.startswith("step 8 was saved by rank 0")


def test_only_the_saving_host_saves() -> None:
    heartbeat, own = Heartbeat(), Here(2)
    own.records = Records(heartbeat._memory)
    heartbeat.step = 9
    save, wait = SaveOnFailure(heartbeat, 2, {2: own}), lambda seconds: None  # type: ignore[dict-item]
    save.last_step = Kept()
    failure = Failure((3,), "died", 1, "", saving_host=0)
    assert save.lead(failure, wait) == "host 0 saves the last step" and not save.has_begun
    assert save.lead(replace(failure, saving_host=None), wait) == ""
    words = save.lead(replace(failure, saving_host=1), wait)
    assert words.startswith("step 8 was saved by rank 2") and save.has_begun


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.zeros(1 << 19))


def test_buffers_are_saved_as_they_were_after_the_last_step() -> None:
    model = Masked()
    kept = KeptBuffers(model)
    model.norm(torch.randn(4, 3))
    kept.keep()
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.norm(torch.randn(4, 3))
    model.mask += 1
    found = kept.kept()
    assert found.keys() == after.keys() and all(torch.equal(found[name], after[name]) for name in after)
    kept.keep()
    model.mask.numpy()[0] = 5
    with pytest.raises(ValueError, match="mask was changed without an update of its version counter"):
        kept.kept()
    model.register_buffer("made", torch.zeros(1))
    with pytest.raises(ValueError, match="registered or removed buffers"):
        kept.kept()
