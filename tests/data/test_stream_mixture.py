"""A mixture of streams is one stream: the same at any world size, resumed or not, in the proportions asked for."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from tests.data.settings import eval_loader, train_loader
from tests.data.streams import Numbers, Stateful
from tests.data.test_stream import global_batches, ids, read
from trainer.data import Mixture
from trainer.data.loading.base import TrainLoader
from trainer.data.stream_mixture import StreamMixture
from trainer.errors import UserError

SMALL, LARGE = partial(Stateful, num_samples=5), partial(Stateful, num_samples=40, first=20)


def mixed(
    *parts: Any, weights: Any = (1, 3), num_samples: int | None = 64, split: str = "train"
) -> StreamMixture:
    found = Mixture(split, parts or (SMALL, LARGE), weights, num_samples)
    assert isinstance(found, StreamMixture)
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_other_ranks_goes_on_where_two_stopped(workers: int, sharded: bool) -> None:
    def loader(world: int, rank: int) -> TrainLoader:
        return train_loader(mixed(), 8, world, rank, seed=4, num_workers=workers, sharded=sharded)

    whole = read(loader(1, 0))
    assert len(whole) == 8
    saved = []
    for rank in (0, 1):
        writer = loader(2, rank)
        batches = writer.epoch(0)
        for _ in range(3):
            next(batches)
        saved.append(writer.state_dict())
    for world in (1, 4):
        loaders = [loader(world, rank) for rank in range(world)]
        for one in loaders:
            one.resume(saved)
        found = global_batches([read(one, 0, 24) for one in loaders])
        assert torch.equal(torch.cat(found), torch.cat(whole[3:]))
    [again] = global_batches([read(loader(2, rank), 0)[:1] for rank in (0, 1)])
    assert torch.equal(again, whole[0]), "from the beginning, too"


def test_parts_come_in_proportion_and_one_that_ends_begins_again_in_another_epoch() -> None:
    rows = torch.cat(read(train_loader(mixed(num_samples=800), 8)))
    small = rows[:, 0] * 64 < 20
    assert 0.2 < small.float().mean() < 0.3
    seen = Counter((rows[small][:, 0] * 64).int().tolist())
    assert set(seen) == set(range(5)) and max(seen.values()) - min(seen.values()) <= 1
    assert len(rows[small][:, 1].unique()) > 10, "set_epoch differs in each pass"
    order = [ids(batch) for batch in train_loader(mixed(), 8).epoch(1)]
    assert order != [ids(batch) for batch in train_loader(mixed(), 8).epoch(0)]


def test_held_out_data_is_all_of_each_part() -> None:
    found = [
        number
        for batch, numbers in eval_loader(mixed(split="eval"), 8)
        for number in ids(batch)[: len(numbers)]
    ]
    assert found == [*range(23), *range(20, 23)]


def test_what_is_no_mixture_of_streams_is_refused() -> None:
    with pytest.raises(UserError, match=r"do not know their lengths .* set data\.dataset\.weights"):
        mixed(weights=None, num_samples=None)
    with pytest.raises(UserError, match="must have a number above 0 for each of the 2"):
        mixed(weights=(1, 0))
    with pytest.raises(UserError, match="of no mixtures"):
        mixed(mixed, LARGE)
    with pytest.raises(UserError, match=r"datasets\[0\] is empty"):
        read(train_loader(mixed(partial(Numbers, num_samples=0), LARGE), 8))
    assert not hasattr(mixed(Numbers, LARGE), "state_dict"), "all is read again"
    assert mixed().num_classes == 4 and mixed().num_shards == 4
