"""Text of any size: each token once, resumed at any place, in little memory."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.data.settings import eval_loader, train_loader
from tests.data.test_stream import global_batches
from tests.ranks import run_ranks
from trainer.data.loading.collation import Collate
from trainer.data.text import files
from trainer.data.text.files import TextFiles
from trainer.data.text.stream import TextStream


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    (tmp_path / "a.txt").write_text("".join(f"{number} is a line\n" for number in range(100)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(200))
    )
    (tmp_path / "c.bin").write_bytes(bytes(range(1, 10)) + b"x" * 500)  # no lines at all
    return tmp_path


def everything(folder: Path) -> bytes:
    documents = [f"document {number}".encode() for number in range(200)]
    parts = [(folder / "a.txt").read_bytes(), *documents, (folder / "c.bin").read_bytes()]
    return b"".join(part + b"\n" for part in parts)


def test_pieces_are_the_same_wherever_reading_begins(folder: Path) -> None:
    whole = TextFiles(folder)
    chunks = list(whole.chunks(0, whole.num_bytes))
    assert sum(chunk.num_bytes for chunk in chunks) == whole.num_bytes
    assert b"".join(chunk.text + b"\n" * chunk.ends_document for chunk in chunks) == everything(folder)
    for cut in range(0, whole.num_bytes, 37):
        parts = [*whole.chunks(0, cut), *whole.chunks(cut, whole.num_bytes)]  # cut once more
        assert b"".join(chunk.text for chunk in parts) == b"".join(chunk.text for chunk in chunks)
        assert [chunk.ends_document for chunk in parts].count(True) == 202
    for at in range(0, len(chunks), 7):
        assert list(whole.chunks_from(chunks[at].file, chunks[at].offset, whole.num_bytes)) == chunks[at:]


def test_no_character_is_cut_in_two(tmp_path: Path) -> None:
    text = "a" + "\u6f22" * 90000  # three bytes each, and no line
    (tmp_path / "a.txt").write_text(text)
    whole = TextFiles(tmp_path)
    chunks = list(whole.chunks(0, whole.num_bytes))
    assert len(chunks) == 3 and "".join(chunk.text.decode() for chunk in chunks) == text
    for cut in (1, 2, 3, 4, files.CHUNK_BYTES + 1, files.CHUNK_BYTES + 2):
        parts = [*whole.chunks(0, cut), *whole.chunks(cut, whole.num_bytes)]
        assert "".join(chunk.text.decode() for chunk in parts) == text
    assert list(whole.chunks_from(0, chunks[1].offset, whole.num_bytes)) == chunks[1:]


def test_windows_hold_each_token_once_and_go_on_from_any_state(folder: Path) -> None:
    stream = TextStream("train", str(folder), block_size=10, eval_fraction=0.001)
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        windows, states = [], []
        for tokens, targets in stream:
            windows.append(bytes(tokens.tolist() + targets[-1:].tolist()))
            states.append(stream.state_dict())
        begin = everything(folder).index(windows[0])
        assert (begin > 0) == (epoch > 0)
        text = everything(folder)[begin:]
        assert windows == [text[10 * k : 10 * k + 11] for k in range(len(windows))]
        assert len(windows) * 10 > len(text) - 10 - 64  # all but a remainder and what is held out
    for number in range(0, len(states), 17):
        again = TextStream("train", str(folder), block_size=10, eval_fraction=0.001)
        again.set_epoch(1)
        again.load_state_dict(json.loads(json.dumps(states[number])))
        assert again.state_dict() == states[number]
        rest = [bytes(tokens.tolist() + targets[-1:].tolist()) for tokens, targets in again]
        assert rest == windows[number + 1 :]


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_resumed_read_what_one_would_have(folder: Path, sharded: bool) -> None:
    def loader(world: int, rank: int, workers: int = 0):  # type: ignore[no-untyped-def]
        stream = TextStream("train", str(folder), 10, num_shards=8)
        return train_loader(stream, 16, world, rank, sharded=sharded, num_workers=workers)

    whole = [tokens for tokens, _ in loader(1, 0).epoch(2)]
    assert len(whole) > 12
    writer = loader(1, 0)
    batches = writer.epoch(2)
    for _ in range(7):
        batches.take()
    for world, workers in ((2, 0), (4, 1)):
        readers = [loader(world, rank, workers) for rank in range(world)]
        for reader in readers:
            reader.resume([writer.state_dict()])
        ranks = [[tokens for tokens, _ in reader.epoch(2, 7 * 16)] for reader in readers]
        assert torch.equal(torch.cat(global_batches(ranks)), torch.cat(whole[7:]))


def test_so_many_windows_are_held_out(folder: Path) -> None:
    stream = TextStream("eval", str(folder), 10, eval_fraction=0.2, eval_windows=13)
    for _ in range(2):
        numbers = [number for _, of_batch in eval_loader(stream, 4) for number in of_batch]
        assert numbers == list(range(13))


def _peak_mib(path: Path) -> float:
    """The memory that a rank needs in addition to train and evaluate on a file of 5 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loader = train_loader(TextStream("train", str(path), 1024), 32, sharded=True)
    batches = loader.epoch(0)
    for _ in range(200):
        batches.take()
    state = loader.state_dict()
    far = {
        shard: (2**20, {"file": 0, "offset": there[1]["offset"] + 2**28, "tokens": 0})
        for shard, there in state["shards"].items()
    }
    again = train_loader(TextStream("train", str(path), 1024), 32, sharded=True)
    again.resume([{**state, "shards": far}])
    batches = again.epoch(0, 2**24)
    for _ in range(50):
        batches.take()
    list(eval_loader(TextStream("eval", str(path), 1024), 32))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.slow
def test_five_gigabytes_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:  # sparse: a file of 5 GB that takes no disk
        file.truncate(5 * 10**9)
    ((peak),) = run_ranks(_peak_mib, 1, path, init=False)
    print(f"{peak:.0f} MiB")
    assert peak < 190


class Masked(TextStream):
    """Draws for each window, unlike the class it derives from."""

    def decode(self, item: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        window, targets = item
        return window * (torch.rand(len(window)) < 0.5), targets


def shaken(samples: list[Any]) -> Any:
    rows, targets = default_collate(samples)
    return rows + torch.randint(5, ()), targets


@pytest.mark.parametrize(("kind", "collate"), [(Masked, default_collate), (TextStream, shaken)])
def test_generators_are_seeded_for_what_draws(kind: type[TextStream], collate: Collate, folder: Path) -> None:
    """The same batches whatever was drawn before; the generators of the run stay as they were."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        batches = train_loader(kind("train", str(folder), 8), 4, collate=collate).epoch(0)
        found.append([batches.take()[0][0] for _ in range(5)])
        assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, *found))
    plain = train_loader(TextStream("train", str(folder), 8), 4).epoch(0)
    assert not all(torch.equal(rows, plain.take()[0][0]) for rows in found[0])
