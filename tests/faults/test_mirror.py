"""A save at a fault under fsdp, from copies of the shards in memory that outlive their ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.fault_parts import fault
from tests.faults.test_rescue import checkpoints, hash_of, message, start, undisturbed
from trainer.api import composed
from trainer.checkpoint.copies import Copy, CopyWriter, copies_in
from trainer.checkpoint.expected import Expected
from trainer.checkpoint.layout import Chunk, IndexEntry, index_to_json
from trainer.checkpoint.mirror import contents_of
from trainer.checkpoint.open_checkpoint import verified
from trainer.checkpoint.safetensors_files import ToStore
from trainer.distributed.agreement import Alone

MIRRORED = ("strategy=fsdp", "checkpoint.mirror_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        pytest.param(2, fault("kill", 0, 8, "optimizer"), id="rank 0 before the update"),
        pytest.param(2, fault("kill", 1, 8, "update"), id="rank 1 within the update"),
        pytest.param(4, fault("kill", 1, 8, "backward", count=3), id="three of four"),
        pytest.param(2, fault("raise", 0, 8, "update"), id="rank 0 raises within the update"),
        pytest.param(2, fault("stop", 1, 8, "forward"), id="rank 1 is stopped"),
    ],
)
def test_no_step_is_lost(world_size: int, how: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    deadline = ("distributed.timeout_s=5",) if "'stop'" in str(how) else ()
    ended = start(world_size, run_dir, *MIRRORED, *how, *deadline)
    assert 0 not in [rank.code for rank in ended], ended
    # Survivors of a kill in an update have made the step, the dead have not.
    assert checkpoints(run_dir) == ["step_00000007"], ended
    assert "step 7 is saved, by rank " in message(run_dir)
    found = verified(run_dir / "checkpoints" / "step_00000007")
    assert found.manifest.format == "sharded" and len(found.facts["places"]) == world_size
    again = start(world_size, run_dir, *MIRRORED)
    assert [rank.code for rank in again] == [0] * world_size, again
    assert "step_00000007 at step" in again[0].output
    assert hash_of(run_dir) == undisturbed(world_size, tmp_path, "strategy=fsdp")


@pytest.mark.slow
def test_with_every_third_step_the_last_such_is_saved(tmp_path: Path) -> None:
    every = ("strategy=fsdp", "checkpoint.mirror_every=3")
    start(2, tmp_path, *every, *fault("kill", 0, 2, "update"))
    assert checkpoints(tmp_path) == []
    words = "no step is saved: rank 0 has no whole copy of its shard; there is none on disk"
    assert words in message(tmp_path)
    start(2, tmp_path, *every, "checkpoint.every_steps=4", *fault("kill", 0, 6, "update"))
    assert checkpoints(tmp_path) == ["step_00000004"]
    words = "no step is saved: the copies in memory are of step 3; the newest on disk is of step 4"
    assert words in message(tmp_path)
    start(2, tmp_path, *every, "checkpoint.every_steps=4", *fault("kill", 0, 8, "update"))
    assert checkpoints(tmp_path) == ["step_00000004", "step_00000006"]
    again = start(2, tmp_path, *every)
    assert "step_00000006 at step" in again[0].output
    assert hash_of(tmp_path) == undisturbed(2, tmp_path, "strategy=fsdp")


@pytest.mark.slow
def test_hybrid_keeps_one_of_its_groups(tmp_path: Path) -> None:
    hybrid = (*MIRRORED, "strategy.shard_group=2", "ema.decay=0.9")
    start(4, tmp_path, *hybrid, *fault("kill", 0, 8, "update", count=2))
    assert re.search("step 7 is saved, by rank [23]", message(tmp_path))
    files = sorted(path.name for path in (tmp_path / "checkpoints" / "step_00000007").glob("*.safetensors"))
    assert [name[6:11] for name in files] == ["00000", "00001"] * 2, (
        "of the first group, whose ranks are dead"
    )
    start(4, tmp_path, *hybrid)
    assert hash_of(tmp_path) == undisturbed(4, tmp_path, *hybrid[:1], *hybrid[2:])


@pytest.mark.slow
def test_buffers_are_those_of_the_copy(tmp_path: Path) -> None:
    normed = ("model._target_=tests.user_parts.Normed", "optim=adamw", "train.precision=bf16")
    start(2, tmp_path, *MIRRORED, *normed, *fault("kill", 0, 8, "backward"))
    again = start(2, tmp_path, *MIRRORED, *normed)
    assert "step_00000007 at step" in again[0].output
    assert hash_of(tmp_path) == undisturbed(2, tmp_path, "strategy=fsdp", *normed)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy=ddp",), "keeps copies of shards, but strategy=ddp has none; use strategy=fsdp, or"),
        (
            ("strategy=fsdp", "checkpoint.at_fault=false"),
            "but checkpoint.at_fault is false; set it to true, or",
        ),
    ],
)
def test_what_has_no_copies_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint\.mirror_every=1 .*{words} checkpoint.mirror_every=0"):
        composed([*overrides, "checkpoint.mirror_every=1"])


class NotFinite:
    """An `Expected` that finds this tensor not finite."""

    def new_in(self, tensors: dict[str, torch.Tensor]) -> dict[str, set[str]]:
        return {name: {"NaN"} for name, tensor in tensors.items() if tensor.isnan().any()}


FILE = "model-00000-of-00001.safetensors"


def copy_of(writer: CopyWriter, step: int, value: float, facts: dict[str, Any]) -> Copy:
    rows = ToStore("layer.weight", torch.float32, (2,), (torch.full((2,), value),))
    writer.write(step % 2, step, {FILE: [rows]}, json.dumps(facts))
    return copies_in(writer.memory.fd)[step]


@pytest.mark.parametrize(
    ("value", "is_replaced", "words"),
    [(1.0, False, ""), (torch.nan, False, "model.layer.weight is not finite"), (1.0, True, "rank 0 went on")],
)
def test_neither_nan_nor_a_copy_that_was_replaced_is_saved(
    value: float, is_replaced: bool, words: str, tmp_path: Path
) -> None:
    writer = CopyWriter(torch.device("cpu"))
    entry = IndexEntry(torch.float32, torch.Size([2]), (Chunk(FILE, "layer.weight", 0, (2,)),))
    facts = {"state": {"a": 1}, "data": {}, "index": index_to_json({"model.layer.weight": entry})}
    copy = copy_of(writer, 1, value, facts)
    if is_replaced:
        copy_of(writer, 3, value, facts)
    contents = contents_of({0: copy}, {"world_size": 1}, cast(Expected, NotFinite()))
    if not words:
        assert list(contents.write_tensors(tmp_path, Alone())) == [FILE]
    else:
        with pytest.raises(ValueError, match=words):
            contents.write_tensors(tmp_path, Alone())
