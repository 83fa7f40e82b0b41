"""Windows of bytes: their starts, their targets, and which windows are held out."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.text.in_memory import Text
from trainer.errors import UserError


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    path = tmp_path / "numbered.bin"
    path.write_bytes(bytes(range(256)))
    return path


def test_targets_are_the_next_bytes(numbered: Path) -> None:
    text = Text("train", str(numbered), block_size=10, eval_fraction=0.2)  # 25 windows, 5 held out
    tokens, targets = text.__getitems__([0, 7])
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.tolist() == [list(range(10)), list(range(70, 80))]
    assert targets.tolist() == [list(range(1, 11)), list(range(71, 81))]
    assert torch.equal(text[7][0], tokens[1])
    assert torch.equal(text[7][1], targets[1])
    assert (text.vocab_size, text.block_size) == (256, 10)


def test_the_end_of_the_text_is_held_out(numbered: Path) -> None:
    train = Text("train", str(numbered), block_size=10, eval_fraction=0.2)
    held_out = Text("eval", str(numbered), block_size=10, eval_fraction=0.2)
    assert (len(train), len(held_out)) == (20, 5)
    assert [held_out[i][0][0].item() for i in range(5)] == [200, 210, 220, 230, 240]
    with pytest.raises(IndexError):
        train[20]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    parts = {"a.txt": b"01234", "b/x": b"5678", "b/empty": b"", "c": b"X" * 40, "d": b"abc"}
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)

    both = [Text(split, str(tmp_path), block_size=4) for split in ("train", "eval")]
    windows = [
        bytes(tokens.tolist() + targets[-1:].tolist())
        for text in both
        for tokens, targets in zip(*text.__getitems__(range(len(text))), strict=True)
    ]
    joined = b"".join(parts[name] for name in sorted(parts))
    assert windows == [joined[i : i + 5] for i in range(0, len(joined) - 4, 4)]


def test_a_large_file_is_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.seek(2**40 - 10)  # a terabyte of holes
        file.write(bytes(range(11)))
    text = Text("eval", str(path), block_size=2**10)
    assert len(text) > 10**8
    assert text[len(text) - 1][1][-5:].tolist() == [6, 7, 8, 9, 10]


def test_the_default_text_is_the_python_reference() -> None:
    text = Text("train")
    assert len(text) > 2000
    tokens, _ = text.__getitems__(range(len(text)))
    assert b'The "assert" statement' in bytes(tokens.flatten().to(torch.uint8).numpy().astype(np.uint8))


def test_mistakes_are_named(numbered: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        Text("train", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has 256 bytes, too few .*block_size=250"):
        Text("train", str(numbered), block_size=250)
    with pytest.raises(UserError, match=r"has 0 bytes, too few"):
        (tmp_path / "folder").mkdir()
        Text("train", str(tmp_path / "folder"))
    with pytest.raises(UserError, match=r"eval_fraction=1\.0: expected a number between"):
        Text("train", str(numbered), eval_fraction=1.0)
    with pytest.raises(UserError, match="block_size=0"):
        Text("train", str(numbered), block_size=0)
