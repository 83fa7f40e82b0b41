"""Exact ranking metrics over all samples, with correct treatment of ties."""

import torch
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a positive sample outscores a negative one.

    A tie counts half. The pairs are counted in integers (the Mann-Whitney U statistic), so the result is
    exact except for one division. It is NaN if there are no positives or no negatives, or if a score is NaN.

    Args:
        scores: (N,), of any floating dtype.
        labels: (N,), bool.
    """
    if scores.isnan().any():
        return float("nan")
    positives, negatives = _per_score(scores, labels)
    below = negatives.cumsum(0) - negatives
    halves = int((positives * (2 * below + negatives)).sum())
    pairs = int(positives.sum()) * int(negatives.sum())
    return halves / (2 * pairs) if pairs else float("nan")


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the mean, over positive samples, of the precision with the sample's score as the threshold.

    Like scikit-learn's `average_precision_score`, it does not interpolate. Arguments are those of `auc`; the
    result is NaN if there are no positives, or if a score is NaN.
    """
    if scores.isnan().any() or not labels.any():
        return float("nan")
    positives, negatives = (counts.flip(0) for counts in _per_score(scores, labels))
    true_positives = positives.cumsum(0).double()
    precision = true_positives / (true_positives + negatives.cumsum(0))
    return float((precision * positives).sum() / positives.sum())


def f1(predicted: Tensor, labels: Tensor) -> float:
    """Return the harmonic mean of precision and recall for bool tensors; 0 if all are False."""
    hits, total = int((predicted & labels).sum()), int(predicted.sum()) + int(labels.sum())
    return 2 * hits / total if total else 0.0


def _per_score(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of positives and negatives at each distinct score, from the lowest."""
    distinct, which = torch.unique(scores, return_inverse=True)
    positives = torch.bincount(which[labels], minlength=len(distinct))
    return positives, torch.bincount(which, minlength=len(distinct)) - positives
