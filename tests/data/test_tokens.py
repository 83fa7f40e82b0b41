"""Token files: the command's output and errors, and the windows of the dataset."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.settings import train_loader
from trainer.data.loading.reader import random_numbers
from trainer.data.text import files as texts
from trainer.data.text.in_memory import Text
from trainer.data.text.tokens import Tokens
from trainer.data.tokenize import main
from trainer.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A text file, a JSON lines file, and a hidden file."""
    path = tmp_path / "texts"
    path.mkdir()
    (path / "a.txt").write_text("".join(f"line {number}\n" for number in range(500)))
    (path / "b.jsonl").write_text("".join(json.dumps({"text": f"document {n}"}) + "\n\n" for n in range(300)))
    (path / ".hidden").write_text("not this")
    return path


def test_the_bytes_of_all_documents_each_ended_by_a_newline(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(texts, "CHUNK_BYTES", 64)
    out = tmp_path / "out"
    assert main([str(folder), str(out), "--tokenizer", "bytes", "--eval-fraction", "0.1"]) == 0
    train, held_out = (np.fromfile(out / name, np.uint16) for name in ("train.bin", "val.bin"))
    documents = [(folder / "a.txt").read_text(), *(f"document {number}" for number in range(300))]
    assert bytes([*train, *held_out]).decode() == "".join(document + "\n" for document in documents)
    facts = json.loads((out / "tokens.json").read_text())
    assert facts == {
        "tokenizer": "bytes",
        "vocab_size": 256,
        "dtype": "uint16",
        "train": len(train),
        "eval": len(held_out),
        "bytes_per_token": pytest.approx(0.96, abs=0.02),  # the ends of documents are tokens, too
    }
    assert f"{len(train):,} training and " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_mistakes_are_one_message_and_leave_no_files(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"words": 1}\n')
    (tmp_path / "packed.jsonl.gz").write_bytes(b"x")
    for arguments, message in (
        ([folder, tmp_path / "there"], "there already exists; remove it"),
        ([tmp_path / "packed.jsonl.gz", tmp_path / "out"], "gz is not supported: .*; decompress it"),
        ([folder, tmp_path / "out", "--eval-fraction", "1"], "--eval-fraction=1.0: expected"),
        ([tmp_path / "broken.jsonl", tmp_path / "out"], "the line at byte 17 of .*KeyError"),
        ([folder, "/proc/out"], "failed to write /proc/out"),
    ):
        assert main([*map(str, arguments), "--tokenizer", "bytes"]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), (message, error)
    assert not (tmp_path / "out").exists()
    assert [path for path in tmp_path.iterdir() if "part" in path.name] == []


def test_gpt2_by_tiktoken(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a small vocabulary instead of a download."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"li": 256, b"ne": 257, b"line": 258}
    end = {"<|endoftext|>": 259}
    small = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=end)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": small}.__getitem__)
    out = tmp_path / "out"
    assert main([str(folder), str(out), "--tokenizer", "gpt2"]) == 0
    train = np.fromfile(out / "train.bin", np.uint16)
    assert train[:3].tolist() == [258, ord(" "), ord("0")]  # line, space, 0
    assert (train == 259).sum() >= 290  # the end of each document
    assert Tokens("train", str(out), block_size=8).vocab_size == 260


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_hugging_face_tokenizer_is_saved_with_its_tokens(tmp_path: Path, folder: Path, kind: str) -> None:
    """Tokens are bytes, or have a character for a space; decoding works even if a character is split."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "words"))
    if kind == "bytes":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet = []
    special = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["line 1 document 23456789 é"], bpe_trainer)
    (tmp_path / "hf").mkdir()
    made.save(str(tmp_path / "hf" / "tokenizer.json"))
    arguments = [str(folder), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "hf")]
    assert main(arguments) == 2, "no name of the token at a text's end"
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert main(arguments) == 0
    shutil.rmtree(tmp_path / "hf")
    train = Tokens("train", str(tmp_path / "out"), block_size=8)
    tokenizer = train.tokenizer
    assert tokenizer is not None and train.vocab_size == tokenizer.vocab_size == made.get_vocab_size()
    written = np.fromfile(tmp_path / "out" / "train.bin", np.uint16)
    assert (written == tokenizer.end).sum() >= 290
    (tokens,) = tokenizer.encode(["line 1 document é\u20ac".encode()])
    assert tokenizer.decode(tokens.tolist()).strip() == "line 1 document é\u20ac"
    assert tokenizer.decode(tokens[:-1].tolist()).strip().startswith("line 1 document é\ufffd")


def test_windows_from_nanogpts_files(tmp_path: Path) -> None:
    """Without tokens.json, tokens are uint16, and the vocabulary size must be set."""
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match=r"no tokens.json .* set data.dataset.vocab_size"):
        Tokens("train", str(tmp_path), block_size=10)
    held_out = Tokens("eval", str(tmp_path), block_size=10, vocab_size=1000)
    assert [held_out[index][0][0].item() for index in range(len(held_out))] == list(range(0, 90, 10))
    assert len(Tokens("eval", str(tmp_path), 10, 1000, eval_windows=3)) == 3
    with pytest.raises(UserError, match=r"2-byte tokens, more than data\.dataset\.block_size=1000"):
        Tokens("train", str(tmp_path), vocab_size=1000, block_size=1000)
    with pytest.raises(
        UserError, match=r"contains token \d+, but data.dataset.vocab_size=500 allows 0 to 499"
    ):
        list(train_loader(Tokens("train", str(tmp_path), 10, 500), 8).epoch(0))


def test_windows_depend_on_seed_epoch_and_index(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens = Tokens("train", str(tmp_path), block_size=10, vocab_size=1000)

    def starts(epoch: int, seed: int = 0, **settings: int) -> list[int]:
        loader = train_loader(tokens, 9, seed=seed, **settings)
        batches = list(loader.epoch(epoch))
        for inputs, targets in batches:
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            assert torch.equal(inputs + 1, targets)
        return [row[0].item() for inputs, _ in batches for row in inputs]

    first = starts(0)
    assert len(first) == 99
    # One in each ten tokens: all the text is read, about once; but in other windows each time.
    assert sorted(start // 10 for start in first) == list(range(99))
    assert first == starts(0) == starts(0, num_workers=2)
    assert sorted(first) != sorted(starts(1))
    assert sorted(first) != sorted(starts(0, seed=1))
    halves = [
        [r[0].item() for i, _ in train_loader(tokens, 9 * 2, 2, rank).epoch(0) for r in i] for rank in (0, 1)
    ]
    assert [start for pair in zip(*halves, strict=True) for start in pair] == first[:90]


def test_no_training_window_overlaps_the_validation_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    text = Text("train", str(tmp_path / "text"), block_size=10, eval_fraction=0.2)  # 20 windows, 5 held out
    highest = np.full(20, 2**64 - 1, np.uint64)
    inputs, targets = text.draw(range(20), highest)
    assert inputs[:, 0].tolist() == [number * 10 + 5 for number in range(19)] + [190]
    assert targets.max() == 200


def test_random_numbers_are_spread_and_determined_by_their_arguments() -> None:
    numbers = random_numbers(1, 2, range(10_000))
    assert numbers[7] == random_numbers(1, 2, [7])[0]
    assert len({*numbers.tolist(), *random_numbers(1, 3, range(10_000)).tolist()}) == 20_000
    counts = np.bincount((numbers % np.uint64(10)).astype(int))
    assert counts.min() > 900
