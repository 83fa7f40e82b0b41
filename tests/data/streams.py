"""Streams as users write them: with and without a state, in shards, split by get_worker_info, broken."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

NUM_SAMPLES = 50


def numbers_of(rows: Tensor) -> list[int]:
    return (rows[:, 0] * 64).int().tolist()


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """Sample i of epoch e: a row of ten numbers, i, e and noise; without a state, of unknown length."""

    num_classes = 4

    def __init__(
        self, split: str = "train", num_samples: int = NUM_SAMPLES, first: int = 0, step: int = 1
    ) -> None:
        self.num_samples = num_samples if split == "train" else 23
        self.first, self.step, self.epoch = first, step, 0
        self.num_given = 0  # by all iterators

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.samples(0)

    def samples(self, begin: int) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()  # as torch's documentation has it; the harness shares out, and hides them
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(self.first + self.step * begin, self.num_samples, self.step)[first::step]:
            self.num_given += 1
            row = torch.cat([torch.tensor([number, self.epoch]) / 64, torch.rand(8)])
            yield row, torch.tensor(number % 4)


class Dividing(Numbers):
    """Takes every n-th sample on each rank, and has `divides_itself`."""

    divides_itself = True

    def __init__(self, rank: int = 0, num_ranks: int = 1, **options: Any) -> None:
        super().__init__(first=rank, step=num_ranks, **options)


class Stateful(Numbers):
    """The same samples, from a stream with the methods of Hugging Face's streams, including shards."""

    num_shards = 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position, self._begin = 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position = self._begin
        for sample in self.samples(self._begin):
            self.position += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = state["position"]

    def shard(self, num_shards: int, index: int) -> "Stateful":
        return Stateful("train", self.num_samples, first=index, step=num_shards)


class Uneven(Stateful):
    """Shard 2 ends early."""

    def shard(self, num_shards: int, index: int) -> "Stateful":
        return Stateful("train", 30 if index == 2 else self.num_samples, first=index, step=num_shards)


class Broken(Numbers):
    def samples(self, begin: int) -> Iterator[tuple[Tensor, Tensor]]:
        for sample in super().samples(begin):
            if numbers_of(sample[0][None]) == [13]:
                raise OSError("part-0013: truncated")
            yield sample
