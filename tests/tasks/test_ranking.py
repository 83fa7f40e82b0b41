"""AUC, average precision and F1 are equal to their definitions."""

import math

import pytest
import torch
from torch import Tensor

from trainer.tasks.ranking import auc, average_precision, f1

TIES = [1000, 7, 1]  # distinct scores


def drawn(num_scores: int, num_samples: int = 211) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_scores)
    labels = torch.rand(num_samples, generator=generator) < 0.3
    scores = torch.randint(num_scores, (num_samples,), generator=generator) + 40 * labels
    return (scores / 97).float() if num_scores > 1 else torch.zeros(num_samples), labels


@pytest.mark.parametrize("num_scores", TIES)
def test_metrics_equal_their_definition(num_scores: int) -> None:
    scores, labels = drawn(num_scores)
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels].tolist() for n in scores[~labels].tolist()]
    assert auc(scores, labels) == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-15)
    precisions = [labels[scores >= score].double().mean().item() for score in scores[labels]]
    assert average_precision(scores, labels) == pytest.approx(
        math.fsum(precisions) / len(precisions), abs=1e-14
    )
    predicted = scores > 0.3
    precision, recall = labels[predicted].double().mean(), predicted[labels].double().mean()
    if predicted.any():
        assert f1(predicted, labels) == pytest.approx((2 * precision * recall / (precision + recall)).item())


def test_labels_with_nothing_to_rank() -> None:
    scores, labels = torch.tensor([0.1, 0.2]), torch.tensor([True, True])
    assert math.isnan(auc(scores, labels))
    assert math.isnan(auc(scores, ~labels))
    assert average_precision(scores, labels) == 1
    assert math.isnan(average_precision(scores, ~labels))
    assert math.isnan(auc(torch.tensor([0.1, math.nan]), torch.tensor([True, False])))
    assert (f1(~labels, ~labels), f1(labels, labels)) == (0, 1)
