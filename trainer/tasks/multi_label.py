"""Any number of labels for each input."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.tasks.cross_entropy import inputs_and_labels, logits_of
from trainer.tasks.ranking import auc, average_precision, f1


class MultiLabel:
    """Batches are (inputs (B, ...), labels (B, L) from 0 to 1); the model returns a logit for each label.

    Other labels raise an error; every label counts.

    Evaluation, from the scores of all samples: loss, the mean binary cross entropy; auc and
    mean_average_precision, means over the labels with both positive and negative samples; f1 of all
    decisions together and macro_f1, the mean of each label's, at the threshold.

    Args:
        threshold: a label is predicted from this probability on.
    """

    metric_names = ("loss", "auc", "mean_average_precision", "f1", "macro_f1")

    def __init__(self, threshold: float = 0.5) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold} is not between 0 and 1")
        self._least_score = math.log(threshold / (1 - threshold))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(*self._scores(model, batch))

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        labels = inputs_and_labels(batch)[1]
        _refuse_others(labels)
        return labels.numel()

    def rows(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """loss (B,), scores (B, L) float32, labels (B, L) bool."""
        scores, labels = self._scores(model, batch)
        _refuse_others(labels)
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)
        return {"loss": loss, "scores": scores, "labels": labels > 0.5}

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        scores, labels = rows["scores"], rows["labels"]
        predicted = scores >= self._least_score
        each = [(scores[:, k], labels[:, k], predicted[:, k]) for k in range(labels.shape[1])]
        return {
            "loss": float(rows["loss"].double().mean()),
            "auc": _mean([auc(score, label) for score, label, _ in each if not label.all()]),
            "mean_average_precision": _mean(
                [average_precision(*one[:2]) for one in each if not one[1].all()]
            ),
            "f1": f1(predicted, labels),
            "macro_f1": _mean([f1(guess, label) for _, label, guess in each]),
        }

    def predict(self, model: nn.Module, batch: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """labels, predictions (0 or 1) and probabilities, (B, L) each; no labels of inputs alone."""
        if isinstance(batch, Tensor):
            scores, known = logits_of(model(batch)), {}
        else:
            scores, labels = self._scores(model, batch)
            known = {"labels": labels.long()}
        predictions = (scores >= self._least_score).long()
        return known | {"predictions": predictions, "probabilities": scores.sigmoid()}

    def _scores(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = inputs_and_labels(batch)
        scores = logits_of(model(inputs))
        if scores.shape != labels.shape:
            raise UserError(
                f"the labels are {tuple(labels.shape)}, one column for each label, but the model returns "
                f"{tuple(scores.shape)}; they must be equal: set model.num_classes to the number of labels"
            )
        return scores, labels.float()


def _refuse_others(labels: Tensor) -> None:
    """Raise UserError if a label is not from 0 to 1; torch accepts any number."""
    least, largest = (extreme.item() for extreme in labels.float().aminmax())
    if not 0 <= least <= largest <= 1:
        raise UserError(
            f"the smallest label is {least:g} and the largest {largest:g}, but MultiLabel takes 0 to 1, and "
            "counts every label; check the data, or set data.task to your own task"
        )


def _mean(values: list[float]) -> float:
    """The mean of defined values: a label that no sample has, or every sample, has no ranking."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else float("nan")
