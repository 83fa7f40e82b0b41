"""A stream's global batches are slices of its order, for any number of ranks, workers and resumes."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from tests.data.settings import eval_loader, message_of, train_loader
from tests.data.streams import Broken, Dividing, Numbers, Stateful, Uneven, numbers_of
from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import train
from trainer.data.loading.loaders import TrainLoader
from trainer.errors import UserError


def ids(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return numbers_of(batch[0])


def read(loader: TrainLoader, epoch: int = 0, first: int = 0) -> list[torch.Tensor]:
    return [rows for rows, _ in loader.epoch(epoch, first)]


def global_batches(ranks: list[list[torch.Tensor]], micro_batches: int = 1) -> list[torch.Tensor]:
    """Return the rows of each step in the order of the stream; some ranks may have one step more."""
    steps = min(len(batches) for batches in ranks) // micro_batches
    joined = [
        [torch.cat(batches[s * micro_batches : (s + 1) * micro_batches]) for batches in ranks]
        for s in range(steps)
    ]
    return [torch.stack(parts, dim=1).flatten(0, 1) for parts in joined]


@pytest.mark.parametrize("stream", [Numbers, Stateful])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_consecutive_slices_at_any_world_size_and_after_a_resume(
    stream: type, workers: int
) -> None:
    """Compare whole samples: epoch, ids and noise."""
    whole = global_batches([read(train_loader(stream(), 8, seed=4), 3)])
    assert numbers_of(torch.cat(whole)) == list(range(48))  # 2 remain
    assert (torch.cat(whole)[:, 1] * 64 == 3).all()
    noise = torch.cat(whole)[:, 2:]
    assert noise.unique().numel() == noise.numel()
    for world, micro in ((2, None), (4, 1)):
        for first in (0, 24):
            loaders = [
                train_loader(stream(), 8, world, r, micro=micro, seed=4, num_workers=workers)
                for r in range(world)
            ]
            ranks = [read(loader, 3, first) for loader in loaders]
            found = global_batches(ranks, 2 if micro else 1)
            assert torch.equal(torch.cat(found), torch.cat(whole[first // 8 :]))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_stream_with_state_is_not_read_again(workers: int, sharded: bool) -> None:
    """Save on two ranks, resume on one and on four: with a state, at most one batch is read again."""

    def loader(world: int, rank: int, stream: Stateful) -> TrainLoader:
        return train_loader(stream, 8, world, rank, num_workers=workers, sharded=sharded)

    whole = read(loader(1, 0, Stateful()))
    saved = []
    for rank in (0, 1):
        writer = loader(2, rank, Stateful())
        batches = writer.epoch(0)
        for _ in range(3):
            batches.take()
        saved.append(writer.state_dict())
    for world in (1, 4):
        streams = [Stateful() for _ in range(world)]
        loaders = [loader(world, rank, stream) for rank, stream in enumerate(streams)]
        for one in loaders:
            one.resume(saved)
        found = global_batches([read(one, 0, 24) for one in loaders])
        assert torch.equal(torch.cat(found), torch.cat(whole[3:]))
        if workers == 0 and not sharded:
            assert all(stream.num_given <= 50 - 24 + 1 for stream in streams)


def test_reading_again_without_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    read(train_loader(Numbers(), 8), 0, 16)
    read(train_loader(Numbers(), 8, 2, 1), 0, 16)  # the first rank reports for all
    assert [record.getMessage() for record in caplog.records] == [
        "Numbers has no state_dict to save its position: the first 16 samples of the epoch are read and "
        "dropped; with data workers, this must finish within distributed.timeout_s"
    ]


def test_each_shard_is_read_by_one_rank() -> None:
    """Sample i is element i // 4 of shard i % 4. The shortest shard ends the epoch on all ranks."""
    for stream, num_steps in ((Stateful, 6), (Uneven, 3)):
        whole = read(train_loader(stream(), 8, sharded=True))
        assert numbers_of(torch.cat(whole)) == list(range(8 * num_steps))
        for world in (2, 4):
            loaders = [train_loader(stream(), 8, world, rank, sharded=True) for rank in range(world)]
            ranks = [read(loader) for loader in loaders]
            assert torch.equal(torch.cat(global_batches(ranks)), torch.cat(whole))
            assert set(loaders[1].state_dict()["shards"]) == {str(shard) for shard in range(1, 4, world)}


def test_each_rank_reads_all_samples_of_a_stream_that_divides_itself() -> None:
    whole = read(train_loader(Numbers(), 8))
    for workers in (0, 2):
        loaders = [
            train_loader(Dividing(rank, 2), 8, 2, rank, num_workers=workers, micro=2) for rank in (0, 1)
        ]
        assert all(loader.num_samples is None for loader in loaders)
        found = global_batches([read(loader) for loader in loaders], 2)
        assert torch.equal(torch.cat(found), torch.cat(whole))
        assert torch.equal(torch.cat(read(loaders[1], 0, 8)), torch.cat(whole)[9::2])
    with pytest.raises(UserError, match="now read as 1, which changes the order"):
        train_loader(Dividing(), 8).resume([loaders[0].state_dict()])
    with pytest.raises(UserError, match=r"Dividing\.divides_itself is not supported for validation data"):
        eval_loader(Dividing(), 8)
    with pytest.raises(
        UserError, match=r"data\.sharded is not supported with Dividing, because it divides itself"
    ):
        train_loader(Dividing(), 8, sharded=True)


class ByRank(Numbers):
    """Divides itself by environment variables, without `divides_itself`."""

    def __init__(self, split: str) -> None:
        super().__init__(split, 64, first=int(os.environ.get("RANK", 0)), step=2)


class Shorter(ByRank):
    """Has `divides_itself`: 32 samples on rank 0, 16 on rank 1."""

    divides_itself = True

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.num_samples //= 1 + self.first


class PartByRank(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The data of `ByRank`, read by index."""

    num_classes = 4

    def __init__(self, split: str) -> None:
        self.samples = list(ByRank(split))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index]


@pytest.mark.slow
def test_undeclared_division_by_rank_is_reported_before_the_first_step(tmp_path: Path) -> None:
    """For a stream this is an error; for data read by index, which may use its own generator, a warning."""
    words = ["model.input_shape=[10]", "logger=jsonl", "strategy=ddp", "train.eval_every_epochs=0"]
    words += ["train.max_steps=2", "train.global_batch_size=8"]
    stream, by_index = (f"data.dataset._target_={__name__}.{kind.__name__}" for kind in (ByRank, PartByRank))
    mistakes = [(*words, stream, f"data.num_workers={n}", f"run_dir={tmp_path / str(n)}") for n in (0, 1)]
    for messages in run_ranks(refusals, 2, *mistakes, init=False):
        assert all(
            "reads a different sample 0 of the training stream than rank 0" in each for each in messages
        )
    assert not list(tmp_path.glob("*/checkpoints/step*"))
    for workers in (0, 1):
        run_dir = tmp_path / f"by index {workers}"
        run_ranks(
            train, 2, *words, by_index, f"data.num_workers={workers}", f"run_dir='{run_dir}'", init=False
        )
        log = (run_dir / "train.log").read_text()
        assert (
            log.count("reads a different sample 0 of the training data than rank 0. If the dataset div") == 1
        )


@pytest.mark.slow
def test_leftover_samples_of_some_ranks_are_reported_once(tmp_path: Path) -> None:
    words = [
        f"data.dataset._target_={__name__}.Shorter",
        "model.input_shape=[10]",
        "train.eval_every_epochs=0",
    ]
    words += ["train.max_steps=9", "train.global_batch_size=8", "strategy=ddp", f"run_dir={tmp_path}"]
    run_ranks(train, 2, *words, init=False)
    log = (tmp_path / "train.log").read_text()
    assert log.count("the stream ended on") == 1
    assert "epoch 0 ended after 32 samples, because the stream ended on rank 1. At least 4 more" in log
    too_large = (*words, "train.global_batch_size=64", f"run_dir={tmp_path / 'other'}")
    for (message,) in run_ranks(refusals, 2, too_large, init=False):
        assert "has less training data than one global batch of 64 samples on rank 1; lower" in message


def test_data_left_is_false_after_the_last_step() -> None:
    """7 samples on two ranks in batches of 2: only rank 0 has a fourth sample."""
    for rank, left in ((0, [True, True, True, False]), (1, [True, True, False])):
        batches = train_loader(Numbers(num_samples=7), 2, 2, rank).epoch(0)
        assert ids(batches.ahead()[0]) == ids(batches.take()[0]) == [rank]
        found = [batches.data_left]
        for _ in batches:
            found.append(batches.data_left)
        assert found == left


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_evaluation_reads_a_stream_once_in_equally_many_batches_per_rank(workers: int) -> None:
    for world, size in ((1, 10), (2, 11), (4, 3), (3, 8)):
        loaders = [
            eval_loader(Numbers("eval"), size, world, rank, num_workers=workers) for rank in range(world)
        ]
        for _ in range(2):  # each evaluation begins again
            ranks = [list(loader) for loader in loaders]
            assert len({len(batches) for batches in ranks}) == 1
            numbers = [n for batches in ranks for _, of_batch in batches for n in of_batch]
            assert sorted(numbers) == list(range(23))
            for batch, of_batch in (pair for batches in ranks for pair in batches):
                assert ids(batch) == of_batch or (len(batch) and not of_batch)  # a filler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_of_a_stream_is_one_message(workers: int) -> None:
    for batches in (
        train_loader(Broken(), 8, num_workers=workers).epoch(0),
        iter(eval_loader(Broken(), 8, num_workers=workers)),
    ):
        assert message_of(batches) == (
            "sample 13 of Broken cannot be read: part-0013: truncated; fix it, or skip it in the stream"
        )


def test_settings_for_another_kind_of_data_are_refused() -> None:
    with pytest.raises(UserError, match="Numbers, because a stream must skip broken samples itself"):
        train_loader(Numbers(), 8, on_bad_sample="skip")
    with pytest.raises(UserError, match=r"num_shards and shard of .*, which Numbers does not have"):
        train_loader(Numbers(), 8, sharded=True)
    with pytest.raises(UserError, match="is for streams, but range is read by index"):
        train_loader(range(64), 8, sharded=True)
    with pytest.raises(UserError, match="the validation data is empty"):
        list(eval_loader(Numbers(num_samples=0), 8))
    other = train_loader(Stateful(), 8, sharded=True)
    batches = other.epoch(0)
    batches.take()
    with pytest.raises(
        UserError, match="read as 4 shards when the checkpoint was saved, but is now read as 1"
    ):
        train_loader(Stateful(), 8).resume([other.state_dict()])
