"""Rows read from each kind of file equal those written; files are written atomically."""

import csv
import errno
import json
from pathlib import Path

import pytest
import torch

from trainer.errors import RetryableError, UserError
from trainer.files.writing import output_file
from trainer.inference.prediction_file import writer_for

ROWS = {
    "label": torch.tensor([3, 1, 2]),
    "half": torch.tensor([0.1, 1e-20, float("nan")]).bfloat16(),
    "probabilities": torch.rand(3, 2, generator=torch.Generator().manual_seed(0)),
}
NAMES = {"index": torch.tensor([0, 1, 5]), "input": ["a.png", 'b,"ö".png', "c.png"]}


def written(path: Path) -> Path:
    with output_file(path) as binary:
        writer_for(path)(binary, NAMES | ROWS)
        assert not path.exists()
    return path


def test_csv(tmp_path: Path) -> None:
    with written(tmp_path / "a.csv").open(newline="") as lines:
        header, *rows = csv.reader(lines)
    assert header == ["index", "input", "label", "half", "probabilities_0", "probabilities_1"]
    assert [row[1] for row in rows] == NAMES["input"]
    assert torch.tensor([[float(cell) for cell in row[4:]] for row in rows]).equal(ROWS["probabilities"])
    assert max(len(cell) for row in rows for cell in row[4:]) <= 12  # the shortest digits that say it


def test_json_lines(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in written(tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 5]
    assert [row["input"] for row in rows] == NAMES["input"]
    assert [row["label"] for row in rows] == [3, 1, 2]
    assert torch.tensor([row["probabilities"] for row in rows]).equal(ROWS["probabilities"])
    assert torch.tensor([row["half"] for row in rows]).bfloat16()[:2].equal(ROWS["half"][:2])


def test_tensors(tmp_path: Path) -> None:
    columns = torch.load(written(tmp_path / "a.pt"), weights_only=True)
    assert list(columns) == [*NAMES, *ROWS]
    assert columns["index"].tolist() == [0, 1, 5] and columns["input"] == NAMES["input"]
    assert columns["probabilities"].equal(ROWS["probabilities"])


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(RetryableError, match=r"a\.csv cannot be written: No space left"),
        output_file(tmp_path / "a.csv"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError), output_file(tmp_path / "a.csv"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_file_created_in_the_meantime_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already exists"), output_file(tmp_path / "a.csv") as file:
        file.write(b"ours")
        (tmp_path / "a.csv").write_text("theirs")
    assert (tmp_path / "a.csv").read_text() == "theirs"
    with output_file(tmp_path / "a.csv", replace=True) as file:
        file.write(b"ours")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["ours"]
