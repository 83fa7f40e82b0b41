"""The index of a checkpoint locates the rows of each tensor in every layout, and stays small."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.runs import train
from trainer.checkpoint.layout import IndexEntry, Plan, WrittenChunks, index_from_json
from trainer.tensors.local_shard import num_rows

# Three FSDP ranks saved it with format version 4, and this was the hash of their model.
OLD = Path(__file__).parent / "version_4" / "step_00000002"
OLD_SHA256 = "264e7cdb09929ebf3c51f97955f4e8e61895196a8d65d36ca1699e5f14d347af"


def test_a_checkpoint_of_format_4_is_resumed(tmp_path: Path) -> None:
    words = (
        "optim=adamw",
        "model.hidden=[4]",
        "schedule=constant",
        "logger=jsonl",
        "train.global_batch_size=12",
        f"resume={OLD}",
    )
    result = train(*words, "train.eval_every_epochs=0", "train.max_steps=2", f"run_dir={tmp_path}")
    assert result["param_sha256"] == OLD_SHA256


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 2), (7,), (16, 1)], ids=str)
@pytest.mark.parametrize("num_writers", [1, 2, 3, 8, 17])
def test_chunks_are_all_rows_in_order(shape: tuple[int, ...], num_writers: int) -> None:
    """Ranks without rows have no chunk, and any range of rows is found."""
    entry = IndexEntry(
        torch.float32, torch.Size(shape), WrittenChunks("model.a", shape, range(num_writers), num_writers)
    )
    rows, chunks = num_rows(shape), list(entry.chunks)
    sizes = [num_rows(chunk.shape) for chunk in chunks]
    assert sum(sizes) == rows and [chunk.begin for chunk in chunks] == [0, *itertools.accumulate(sizes)][:-1]
    assert rows == 0 or min(sizes) > 0
    for begin, end in itertools.combinations(range(rows + 1), 2):
        found = list(entry.overlapping(begin, end))
        assert found == [c for c in chunks if begin < c.begin + num_rows(c.shape) and c.begin < end]


def test_the_index_of_a_large_run_grows_with_ranks_plus_tensors() -> None:
    names = [f"model.layers.{number}.weight" for number in range(3000)]
    tensors = {name: torch.empty(8192, 1024, device="meta") for name in (*names, "model.tied")}

    def size(world_size: int) -> int:
        everyone = list(range(world_size))
        plan = Plan("sharded", world_size, dict.fromkeys(names, everyone), {"model.tied": names[0]})
        return len(plan.indexed(tensors).index)

    assert size(2048) < size(8) + 8 * 2048
    index = index_from_json(
        json.loads(
            Plan("sharded", 4, {"model.a": [2, 3]}, {"model.b": "model.a"})
            .indexed({"model.a": torch.empty(5, 2), "model.b": torch.empty(5, 2)})
            .index
        )
    )
    assert [chunk.file for chunk in index["model.b"].chunks] == [
        "model-00002-of-00004.safetensors",
        "model-00003-of-00004.safetensors",
    ]
    assert {chunk.key for chunk in index["model.b"].chunks} == {"a"}
