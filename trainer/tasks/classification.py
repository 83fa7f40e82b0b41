"""One class for each input."""

import torch
from torch import Tensor, nn

from trainer.tasks.base import Evaluation, Shown
from trainer.tasks.cross_entropy import (
    CrossEntropy,
    classes_of,
    counted,
    inputs_and_any_labels,
    inputs_and_labels,
    logits_as_made,
    logits_of,
    num_counted,
)

_CONFUSIONS_OF = 20  # at most this many classes: their square is counted, and shown


class Classification:
    """One class for each input: batches are (inputs (B, ...), labels (B,)), the model returns (B, classes).

    A label of -100 does not count. Labels may also be class probabilities (B, classes), or one-hot: the
    class with the largest then counts as correct.

    Evaluation: mean cross entropy (without smoothing, so that runs are comparable), accuracy and, with
    more than five classes, top5_accuracy. Shown: the first held-out images with their predicted classes, and
    a confusion table of at most 20.
    """

    metric_names = ("loss", "accuracy", "top5_accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} is not within [0, 1]")
        self.label_smoothing = label_smoothing
        self.plain_loss: Tensor | None = None
        self._cross_entropy = CrossEntropy("model.num_classes")

    def compile(self) -> None:
        self._cross_entropy.compile()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = inputs_and_labels(batch)
        logits = logits_as_made(model(inputs))
        if self.label_smoothing:
            self.plain_loss = self._cross_entropy(logits.detach(), labels)
        return self._cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return num_counted(inputs_and_labels(batch)[1])

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """[loss, correct, labels, correct in the top five, labels with more than five classes, confusions]

        The confusions are the samples of class i predicted as class j, at i * classes + j.
        """
        inputs, labels = inputs_and_labels(batch)
        logits = logits_of(model(inputs))
        has_top5 = logits.shape[1] > 5
        loss = self._cross_entropy(logits, labels, reduction="sum")
        likeliest, labels = _likeliest(logits), classes_of(labels, logits)
        hits, count = likeliest == labels.unsqueeze(1), counted(labels).sum()
        sums = [loss.double(), hits[:, 0].sum(), count, hits.sum() * has_top5, count * has_top5]
        return torch.cat([torch.stack(sums), _confusions(likeliest[:, 0], labels, logits.shape[1])])

    def predict(self, model: nn.Module, batch: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """label (B,), prediction (B,), the most likely class, and probabilities (B, classes).

        An uncounted label stays -100; a batch of inputs alone has no column for them.
        """
        inputs, labels = inputs_and_any_labels(batch)
        logits = logits_of(model(inputs))
        known = {} if labels is None else {"label": classes_of(labels, logits)}
        return known | {"prediction": _likeliest(logits)[:, 0], "probabilities": logits.softmax(dim=1)}

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, accuracy = (sums[:2] / sums[2]).tolist()  # NaN if no label counts
        metrics = {"loss": loss, "accuracy": accuracy}
        return metrics | {"top5_accuracy": float(sums[3] / sums[4])} if sums[4] else metrics

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        assert evaluation.sums is not None
        confusions = evaluation.sums[5:]
        texts = {"eval/confusion": _table(confusions)} if len(confusions) else {}
        inputs, labels = (values[:32] for values in evaluation.batch)
        logits = logits_of(model(inputs))
        taken_for, labels = _likeliest(logits)[:, 0].tolist(), classes_of(labels, logits)
        if inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or labels.ndim != 1:
            return Shown(texts)
        from trainer.tasks.pictures import captioned  # imports Pillow

        pairs = list(zip(labels.tolist(), taken_for, strict=True))
        words = [f"{label}" if label == taken else f"{label} as {taken}" for label, taken in pairs]
        return Shown(texts, {"eval/samples": captioned(inputs, words, [one == two for one, two in pairs])})


def _confusions(taken_for: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The number of samples of each class predicted as each; empty for many classes or labels by pixel."""
    if classes > _CONFUSIONS_OF or labels.ndim != 1:
        return torch.zeros(0, dtype=torch.float64, device=labels.device)
    is_class = counted(labels)
    where = torch.where(is_class, labels * classes + taken_for, 0)
    counts = torch.zeros(classes**2, dtype=torch.float64, device=labels.device)
    return counts.index_add_(0, where, is_class.double())


def _table(confusions: Tensor) -> str:
    matrix = confusions.reshape(int(len(confusions) ** 0.5), -1).long().tolist()
    head = "| class, taken for | " + " | ".join(map(str, range(len(matrix)))) + " |"
    rows = [f"| **{k}** | " + " | ".join(map(str, row)) + " |" for k, row in enumerate(matrix)]
    return "\n".join([head, "|---" * (len(matrix) + 1) + "|", *rows])


def _likeliest(logits: Tensor) -> Tensor:
    """The five most likely classes, most likely first, or all of fewer; ties yield one answer."""
    return logits.topk(5 if logits.shape[1] > 5 else 1, dim=1).indices
