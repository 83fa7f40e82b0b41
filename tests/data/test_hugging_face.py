"""Hugging Face's streaming datasets from a local folder: order, state and shards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.settings import eval_loader, train_loader
from tests.data.test_stream import global_batches
from trainer.errors import UserError

pytest.importorskip("datasets")

from trainer.data.hugging_face import hugging_face

FILES = 4


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for file in range(FILES):
        rows = [
            {"row": [number, number / 2], "label": number % 3} for number in range(file * 12, file * 12 + 12)
        ]
        (tmp_path / f"train-{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held-out.jsonl").write_text(
        "\n".join(json.dumps({"row": [n, 0], "label": 0}) for n in range(7))
    )
    files = {"train": str(tmp_path / "train-*.jsonl"), "eval": str(tmp_path / "held-out.jsonl")}
    return {"path": "json", "data_files": files, "columns": ["row", "label"]}


@pytest.mark.parametrize(("sharded", "buffer"), [(False, 0), (True, 0), (False, 10)])
def test_rows_are_read_once_in_the_same_order_after_a_resume(
    options: dict, sharded: bool, buffer: int
) -> None:
    def loader(world: int = 1, rank: int = 0, workers: int = 0):  # type: ignore[no-untyped-def]
        stream = hugging_face("train", shuffle_buffer=buffer, **options)
        return train_loader(stream, 8, world, rank, sharded=sharded, num_workers=workers)

    whole = [rows for rows, _ in loader().epoch(1)]
    assert sorted(torch.cat(whole)[:, 0].tolist()) == list(range(48))
    if sharded:
        files = torch.cat(whole)[:, 0].view(-1, FILES) // 12  # each row of four: one of each file
        assert all(sorted(row) == list(range(FILES)) for row in files.tolist())
    writers = [loader(2, rank) for rank in (0, 1)]
    for writer in writers:
        batches = writer.epoch(1)
        batches.take(), batches.take()
    for workers in (0, 2):
        readers = [loader(2, rank, workers) for rank in (0, 1)]
        for reader in readers:
            reader.resume([writer.state_dict() for writer in writers])
        ranks = [[rows for rows, _ in reader.epoch(1, 16)] for reader in readers]
        assert torch.equal(torch.cat(global_batches(ranks)), torch.cat(whole[2:]))


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    """Return n tokens and an end token for row n."""
    number = int(row["row"][0])
    return {"input_ids": [number] * (number % 5) + [99], "name": str(number)}


@pytest.mark.parametrize(("sharded", "buffer"), [(False, 0), (True, 0), (False, 10)])
def test_rows_are_tokenized_and_packed_also_after_a_resume(options: dict, sharded: bool, buffer: int) -> None:
    options = {**options, "columns": ["input_ids", "labels"], "map": tokenize, "pack": 7}

    def loader(world: int = 1, rank: int = 0):  # type: ignore[no-untyped-def]
        return train_loader(
            hugging_face("train", shuffle_buffer=buffer, **options), 4, world, rank, sharded=sharded
        )

    whole = [tokens for tokens, _ in loader().epoch(1)]
    every = torch.cat(whole).flatten().tolist()
    if not sharded and not buffer:
        wanted = [token for number in range(48) for token in tokenize({"row": [number]})["input_ids"]]
        assert every == wanted[: len(every)] and len(wanted) - len(every) < 4 * 7 + 7
    assert all(tokens.shape == (4, 7) and tokens.equal(labels) for tokens, labels in loader().epoch(1))
    writers = [loader(2, rank) for rank in (0, 1)]
    for writer in writers:
        batches = writer.epoch(1)
        batches.take(), batches.take()
    readers = [loader(2, rank) for rank in (0, 1)]
    for reader in readers:
        reader.resume([writer.state_dict() for writer in writers])
    ranks = [[tokens for tokens, _ in reader.epoch(1, 8)] for reader in readers]
    assert torch.equal(torch.cat(global_batches(ranks)), torch.cat(whole[2:]))


def test_rows_are_mapped_one_by_one(options: dict) -> None:
    stream = hugging_face("eval", **{**options, "columns": None, "map": tokenize})
    made = stream.decode(next(iter(stream)))
    assert made["input_ids"].tolist() == [99] and made["name"] == "0"
    as_tensors = {**options, "map": lambda row: {"input_ids": torch.tensor([row["row"]])}, "pack": 3}
    assert next(iter(hugging_face("eval", **as_tensors))) == [0, 0, 1]
    with pytest.raises(UserError, match=r"map returned a list, but must return a dict"):
        next(iter(hugging_face("eval", **{**options, "map": lambda row: [1], "pack": 4})))
    packed = hugging_face("eval", **{**options, "pack": 4})
    with pytest.raises(
        UserError, match=r"but a row has row, label; return input_ids from data\.dataset\.map"
    ):
        next(iter(packed))


def test_held_out_rows_are_evaluated_once(options: dict) -> None:
    ranks = [list(eval_loader(hugging_face("eval", **options), 2, 2, rank)) for rank in (0, 1)]
    assert sorted(number for batches in ranks for _, numbers in batches for number in numbers) == list(
        range(7)
    )


def test_datasets_that_cannot_be_loaded_are_one_message(options: dict) -> None:
    with pytest.raises(UserError, match=r"load_dataset\('json', split='eval'\) failed: .*held"):
        hugging_face("eval", **{**options, "data_files": {"eval": "/nowhere/held-out.jsonl"}})
