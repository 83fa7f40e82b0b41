"""Ranking metrics over all samples at once: exact, ties included."""

import torch
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: how often a positive sample scores above a negative one; a tie counts half.

    Counted in integers (Mann and Whitney's U), so exact except for one division.

    Args:
        scores: (N,), of any floating dtype.
        labels: (N,), bool.

    Returns:
        NaN without positives, without negatives, or if a score is NaN.
    """
    if scores.isnan().any():
        return float("nan")
    positives, negatives = _per_score(scores, labels)
    below = negatives.cumsum(0) - negatives
    halves = int((positives * (2 * below + negatives)).sum())
    pairs = int(positives.sum()) * int(negatives.sum())
    return halves / (2 * pairs) if pairs else float("nan")


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Mean over the positive samples of the precision among all samples with at least their score.

    Without interpolation, as in scikit-learn. Arguments and NaN as for `auc`; negatives are not needed.
    """
    if scores.isnan().any() or not labels.any():
        return float("nan")
    positives, negatives = (counts.flip(0) for counts in _per_score(scores, labels))
    found = positives.cumsum(0).double()
    precision = found / (found + negatives.cumsum(0))
    return float((precision * positives).sum() / positives.sum())


def f1(predicted: Tensor, labels: Tensor) -> float:
    """Harmonic mean of precision and recall, of bool tensors; 0 without positives and predictions."""
    hits, made = int((predicted & labels).sum()), int(predicted.sum()) + int(labels.sum())
    return 2 * hits / made if made else 0.0


def _per_score(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Positives and negatives at each distinct score, from the lowest."""
    distinct, which = torch.unique(scores, return_inverse=True)
    positives = torch.bincount(which[labels], minlength=len(distinct))
    return positives, torch.bincount(which, minlength=len(distinct)) - positives
