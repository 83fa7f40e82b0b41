"""Classification with any number of labels per input."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.tasks.cross_entropy import inputs_and_labels, logits_of
from trainer.tasks.ranking import auc, average_precision, f1


class MultiLabel:
    """Classification with any number of labels per input.

    Batches are (inputs (B, ...), labels (B, L)), with labels from 0 to 1, and the model returns logits (B,
    L). No label value is ignored; labels out of range raise an error.

    Metrics, from the scores of all samples: loss, the mean binary cross entropy; auc and
    mean_average_precision, averaged over the labels that have both positive and negative samples; f1 over all
    labels together (micro average), and macro_f1, the mean of the labels' f1.

    Args:
        threshold: minimum probability at which a label is predicted, between 0 and 1.
    """

    metric_names = ("loss", "auc", "mean_average_precision", "f1", "macro_f1")

    def __init__(self, threshold: float = 0.5) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold}: expected a number between 0 and 1")
        self._least_score = math.log(threshold / (1 - threshold))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(*self._scores(model, batch))

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        labels = inputs_and_labels(batch)[1]
        _refuse_out_of_range(labels)
        return labels.numel()

    def rows(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return loss (B,), scores (B, L) float32, and labels (B, L) bool."""
        scores, labels = self._scores(model, batch)
        _refuse_out_of_range(labels)
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
                [average_precision(score, label) for score, label, _ in each if not label.all()]
            ),
            "f1": f1(predicted, labels),
            "macro_f1": _mean([f1(guess, label) for _, label, guess in each]),
        }

    def predict(self, model: nn.Module, batch: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return (B, L) tensors: the labels (if given), the predictions (0 or 1) and the probabilities."""
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
                f"the labels have the shape {tuple(labels.shape)}, but the model returns "
                f"{tuple(scores.shape)}; the two must be equal; set model.num_classes to the number of "
                "labels (columns)"
            )
        return scores, labels.float()


def _refuse_out_of_range(labels: Tensor) -> None:
    least, largest = (extreme.item() for extreme in labels.float().aminmax())
    if not 0 <= least <= largest <= 1:
        raise UserError(
            f"the labels range from {least:g} to {largest:g}, but MultiLabel expects 0 to 1 and has no "
            "ignored value such as -100; check the data, or set data.task to your own task"
        )


def _mean(values: list[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else float("nan")
