"""Orders by length, by weight and of a mixture; they are the same on any number of ranks and after a resume."""

import itertools
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.data.settings import train_loader
from tests.runs import settings
from trainer.build.data import build_dataset
from trainer.config.instantiate import instantiate
from trainer.data import Mixture
from trainer.data.digits import Digits
from trainer.data.order import ByLength, ByWeight, Order, shuffled
from trainer.errors import UserError


class Numbers(Dataset[int]):
    def __init__(self, num_samples: int = 100, begin: int = 0, split: str = "train") -> None:
        self.numbers = range(begin, begin + num_samples)
        self.lengths = [number * 7 % 50 for number in self.numbers]
        self.sample_weights = [float(number % 4) for number in self.numbers]
        self.num_classes, self.begin = 10, begin

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if self.begin + index == 1_001:
            raise OSError("truncated")
        return super().__getitem__(index)


class Needs(Numbers):
    def __init__(self, split: str) -> None:
        super().__init__()


class Drawing(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(super().__getitem__(index)), torch.rand(())


class DrawingInBatches(Numbers):
    def __getitems__(self, indices: Any) -> Any:
        return self.draw(indices, np.zeros(len(indices)))

    def draw(self, indices: Any, numbers: Any) -> Any:
        return torch.tensor(indices), torch.from_numpy(numbers / 2**64).float()


def mixture(
    *weights: float, num_samples: int | None = None, kind: Any = Numbers, split: str = "train"
) -> Mixture:
    parts = [partial(kind, 10), partial(kind, 40, 1_000)]
    return Mixture(split, parts, weights or None, num_samples)


def batches(dataset: Any, order: Order, replicas: int = 1, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """Return the samples of each global batch of 8."""
    loaders = [
        train_loader(dataset, 8, replicas, r, order=order).epoch(epoch, first) for r in range(replicas)
    ]
    return [
        sorted(sample for batch in of_step for sample in batch.tolist())
        for of_step in zip(*loaders, strict=True)
    ]


@pytest.mark.parametrize(
    ("dataset", "order"),
    [(Numbers(), ByLength(8, 32)), (Numbers(), ByWeight()), (mixture(1, 1), shuffled)],
    ids=["length", "weight", "mixture"],
)
def test_an_order_with_ranks_epochs_and_resumes(dataset: Any, order: Order) -> None:
    alone = batches(dataset, order)
    assert batches(dataset, order, replicas=2) == batches(dataset, order, replicas=4) == alone
    assert batches(dataset, order, first=24) == alone[3:]
    assert batches(dataset, order, epoch=1) != alone


def test_ranks_compare_their_orders() -> None:
    def of_global(dataset: Any, generator: torch.Generator) -> torch.Tensor:
        return torch.randperm(len(dataset))

    def of_rank(dataset: Any, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(len(dataset)).roll(rank)

    hashes, orders = [], []
    for rank in (0, 1):
        torch.manual_seed(rank)
        torch.rand(rank)
        hashes.append(
            [train_loader(Numbers(), 8, 2, rank, order=o).order_hash() for o in (of_global, of_rank)]
        )
        orders.append(batches(Numbers(), of_global))
    assert orders[0] == orders[1] != batches(Numbers(), of_global, epoch=1)
    assert hashes[0][0] == hashes[1][0] and hashes[0][1] != hashes[1][1]
    assert train_loader(Numbers(), 8).order_hash() is None


def test_batches_by_length_are_similar_and_complete() -> None:
    numbers = Numbers(101)
    order = ByLength(8, 64)(numbers, torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(101))
    spread = [max(of) - min(of) for of in (torch.tensor(numbers.lengths)[g] for g in order.split(8))]
    at_random = torch.tensor(numbers.lengths)[torch.randperm(101)].split(8)
    assert sum(map(int, spread)) < sum(int(max(of) - min(of)) for of in at_random) / 3
    assert len(order.split(8)[-1]) == 5  # the short group comes last, or batches would lie across groups
    means = [torch.tensor(numbers.lengths)[group].float().mean().item() for group in order.split(8)]
    assert means != sorted(means)


def test_sample_weights_are_proportions() -> None:
    numbers = Numbers(4_000)
    drawn = Counter((ByWeight()(numbers, torch.Generator().manual_seed(0)) % 4).tolist())
    assert drawn[0] == 0
    for weight in (1, 2, 3):
        assert drawn[weight] == pytest.approx(4_000 * weight / 6, rel=0.1)
    numbers.sample_weights = [0.0] * 3_999 + [1e-3]
    assert set(ByWeight()(numbers, torch.Generator()).tolist()) == {3_999}


def test_a_mixture_draws_in_proportion_to_weights() -> None:
    counted = [
        Counter(itertools.chain(*batches(mixture(3, 1, num_samples=48), shuffled, epoch=epoch)))
        for epoch in (0, 1)
    ]
    for counts in counted:
        small = {number: count for number, count in counts.items() if number < 1_000}
        assert sum(small.values()) == 36 and set(small.values()) == {3, 4} and len(small) == 10
        assert sum(counts.values()) - 36 == 12 and max(c for n, c in counts.items() if n >= 1_000) == 1
    assert counted[0] != counted[1]  # another part of the large one
    assert len(mixture()) == 50 and len(mixture(3, 1, split="eval")) == 50
    assert [mixture(3, 1, split="eval")[i] for i in range(50)] == [*range(10), *range(1_000, 1_040)]
    assert mixture().num_classes == 10 and not hasattr(mixture(), "begin")


def test_repeated_samples_of_a_mixture_are_augmented_differently() -> None:
    loader = train_loader(mixture(7, 1, num_samples=64, kind=Drawing), 8)
    drawn = [
        pair for batch in loader.epoch(0) for pair in zip(*(part.tolist() for part in batch), strict=True)
    ]
    assert len(set(drawn)) == 64 and len({number for number, _ in drawn}) <= 18


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_repeated_samples_get_different_random_numbers_at_any_world_size(
    in_batches: bool, workers: int
) -> None:
    def order(dataset: Any, generator: torch.Generator) -> list[int]:
        few = torch.randperm(len(dataset), generator=generator)[:16]
        return few.repeat_interleave(4).tolist()

    def draws(
        order: Order | None, replicas: int = 1, first: int = 0, **options: Any
    ) -> list[tuple[int, float]]:
        options |= {"order": order or shuffled, "num_workers": workers}
        loaders = [train_loader(dataset, 16, replicas, r, **options).epoch(0, first) for r in range(replicas)]
        ranks = [[torch.stack([number, drawn], 1) for number, drawn in loader] for loader in loaders]
        return sorted(map(tuple, torch.cat([rows for rank in ranks for rows in rank]).tolist()))

    dataset = (DrawingInBatches if in_batches else Drawing)(64)
    alone = draws(order)
    assert len(set(alone)) == len(alone) == 64 and len({number for number, _ in alone}) == 16
    assert draws(order, 2) == draws(order, 4, micro=2) == alone
    rest = draws(order, 2, first=32)
    assert [pair for pair in alone if pair in rest] == rest == draws(order, first=32)
    assert len({*alone} & {*draws(None)}) == 16  # the first copy is the sample of an order without repeats


def test_a_broken_sample_of_a_mixture_is_replaced() -> None:
    loader = train_loader(mixture(1, 4, num_samples=48, kind=Broken), 8, on_bad_sample="skip")
    seen = [sample for batch in loader.epoch(0) for sample in batch.tolist()]
    assert len(seen) == 48 and 1_001 not in seen and sum(sample >= 1_000 for sample in seen) >= 37
    loader = train_loader(mixture(1, 4, num_samples=48, kind=Broken), 8)
    with pytest.raises(UserError, match="sample 1 of Broken cannot be read: truncated"):
        list(loader.epoch(0))


class Forward(IterableDataset[int]):
    def __init__(self, split: str = "train") -> None:
        self.numbers = range(64)

    def __iter__(self) -> Any:
        return iter(self.numbers)


def test_data_that_cannot_be_ordered_is_refused() -> None:
    def by_calls(dataset: Any, generator: torch.Generator) -> torch.Tensor:
        calls.append(1)
        return torch.arange(len(dataset)).roll(len(calls))

    def later(dataset: Any, generator: torch.Generator) -> torch.Tensor:
        return torch.randperm(len(dataset), generator=generator) - int(generator.initial_seed() > 0)

    calls: list[int] = []
    for order, words in (
        (later, "the order of epoch 1 has indices from -1 to 98, but the dataset's are 0 to 99"),
        (
            lambda *_: [0.5] * 100,
            r"the order of epoch 1 must be a torch.int64 tensor of 100 indices, but is torch.float32 of",
        ),
    ):
        with pytest.raises(UserError, match=words):
            list(train_loader(Numbers(), 8, order=order).epoch(1))
    with pytest.raises(UserError, match="differs if it is computed again"):
        train_loader(Numbers(), 8, order=by_calls).order_hash()
    with pytest.raises(UserError, match=r"data\.order is not supported with Forward, because a stream"):
        train_loader(Forward(), 8, order=ByWeight())
    with pytest.raises(UserError, match=r"data\.order is not supported with Mixture, because"):
        train_loader(mixture(3, 1), 8, order=ByWeight())
    with pytest.raises(UserError, match="requires the dataset to have an attribute lengths"):
        ByLength(8)(Digits("train"), torch.Generator())


def test_data_that_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(UserError, match="datasets\\[0\\] is a Mixture, which is not supported"):
        Mixture("train", [partial(Mixture, datasets=[Numbers]), Numbers])
    with pytest.raises(UserError, match=r"datasets\[1\] is a Forward, which is a stream"):
        Mixture("train", [Numbers, Forward])
    with pytest.raises(UserError, match=r"weights=\(1, -1\): expected a number above 0 for each of"):
        mixture(1, -1)
    node = {"_target_": "trainer.data.Mixture", "datasets": [{"_target_": f"{__name__}.Needs"}]}
    with pytest.raises(UserError, match=r"datasets\.0: .*\+data\.dataset\.datasets\.0\._partial_=true"):
        instantiate("data.dataset", node, split="train")


def test_a_mixture_in_the_settings() -> None:
    part = "{_target_: trainer.data.digits.Digits, _partial_: true}"
    words = ("+data.dataset.weights=[3, 1]", "+data.dataset.num_samples=256")
    mixed = settings(
        "data.dataset._target_=trainer.data.Mixture", f"+data.dataset.datasets=[{part},{part}]", *words
    )
    assert len(build_dataset(mixed.data, "train")) == 256
