"""Batches of `data.collate`, including samples of unequal sizes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tests.data.settings import eval_loader, message_of, train_loader
from trainer.data.padding import Padding
from trainer.errors import UserError


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentence i has i % 5 + 1 words and labels; the labels of every third sentence are ignored."""

    num_classes = 7

    def __init__(self, split: str = "train", num_samples: int = 24) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.arange(index, index + index % 5 + 1)
        labels = (words % 7) if index % 3 else torch.full_like(words, -100)
        return {"words": words, "labels": labels, "number": index}


class InLists(Sentences):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class TooFew(InLists):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return super().__getitems__(indices[1:])


class Forward(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Sentences().__getitem__, range(24))


def test_pads_to_the_largest_size() -> None:
    batch = Padding({"labels": -100, "words": 9}, multiple_of=4)([Sentences()[i] for i in (3, 4, 1)])
    assert batch["words"].tolist() == [[3, 4, 5, 6] + [9] * 4, [4, 5, 6, 7, 8, 9, 9, 9], [1, 2] + [9] * 6]
    assert batch["labels"][1].tolist() == [4, 5, 6, 0, 1, -100, -100, -100]
    assert batch["number"].tolist() == [3, 4, 1]
    images = [(torch.ones(3, height, width), height) for height, width in ((2, 5), (4, 3))]
    filled, heights = Padding([0.5, 0])(images)
    assert filled.shape == (2, 3, 4, 5) and heights.tolist() == [2, 4]
    assert (
        (filled[0, :, 2:] == 0.5).all()
        and (filled[0, :, :2] == 1).all()
        and (filled[1, :, :, 3:] == 0.5).all()
    )


def test_samples_that_padding_cannot_make_equal() -> None:
    with pytest.raises(UserError, match="differ in dimensions or dtype: 1 dimensions"):
        Padding(0)([torch.ones(1), torch.ones(1, 1)])
    with pytest.raises(
        UserError, match=r"TooFew.__getitems__ returned a list of 7 for 8 indices; return a list"
    ):
        list(train_loader(TooFew(), 8, collate=Padding()).epoch(0))


@pytest.mark.parametrize("kind", ["by index", "in lists", "forward"])
def test_every_loader_supports_padding(kind: str) -> None:
    padding = Padding({"labels": -100})
    dataset: Any = Forward() if kind == "forward" else InLists() if "lists" in kind else Sentences()
    batches = list(train_loader(dataset, 8, collate=padding).epoch(0))
    assert Counter(i for batch in batches for i in batch["number"].tolist()) == Counter(range(24))
    for batch in batches:
        assert batch["words"].shape == batch["labels"].shape
        for number, words in zip(batch["number"].tolist(), batch["words"], strict=True):
            expected = Sentences()[number]["words"]
            assert words[: len(expected)].equal(expected) and not words[len(expected) :].any()
    held_out = [numbers for _, numbers in eval_loader(dataset, 5, collate=padding)]
    assert sum(map(len, held_out)) == 24


def test_errors_name_the_sample_and_the_remedy() -> None:
    message = message_of(train_loader(Sentences(), 8).epoch(0))
    assert "of Sentences cannot be in a batch with sample" in message and "trainer.data.padding" in message

    def broken(samples: list[Any]) -> Any:
        raise KeyError(samples[-1]["number"])

    message = message_of(train_loader(Sentences(), 8, collate=broken).epoch(0))
    assert "of Sentences cannot be in a batch: " in message and "raised by data.collate" in message
