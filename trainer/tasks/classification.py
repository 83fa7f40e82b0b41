"""Classification with one class per input."""

import torch
from torch import Tensor, nn

from trainer.accelerator import double, for_sums
from trainer.tasks.base import Evaluation, Shown
from trainer.tasks.cross_entropy import (
    CrossEntropy,
    classes_of,
    counted,
    inputs_and_any_labels,
    inputs_and_labels,
    logits_of,
    num_counted,
    raw_logits,
)

_MAX_CONFUSION_CLASSES = 20  # the confusion table has the square of this number of cells


class Classification:
    """Classification with one class per input.

    Batches are (inputs (B, ...), labels (B,)), and the model returns logits (B, classes). A label of -100 is
    ignored. Labels may also be class probabilities (B, classes) or one-hot; the most likely class is then the
    correct one.

    Metrics: cross entropy (without label smoothing, so that runs are comparable), accuracy and, for more than
    five classes, top5_accuracy. TensorBoard shows the first validation images with their predicted classes
    and, for at most 20 classes, a confusion table.

    Args:
        label_smoothing: as in `torch.nn.CrossEntropyLoss`, from 0 to 1.
    """

    metric_names = ("loss", "accuracy", "top5_accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing}: expected a number from 0 to 1")
        self.label_smoothing = label_smoothing
        self.plain_loss: Tensor | None = None
        self._cross_entropy = CrossEntropy("model.num_classes")

    def compile(self) -> None:
        self._cross_entropy.compile()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = inputs_and_labels(batch)
        logits = raw_logits(model(inputs))
        if self.label_smoothing:
            self.plain_loss = self._cross_entropy(logits.detach(), labels)
        return self._cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return num_counted(inputs_and_labels(batch)[1])

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sums [loss, correct, labels, top-five correct, top-five labels, confusions...].

        The two top-five sums are 0 for up to five classes. Confusion i * classes + j is the number of
        samples of class i predicted as class j.
        """
        inputs, labels = inputs_and_labels(batch)
        logits = logits_of(model(inputs))
        has_top5 = logits.shape[1] > 5
        loss = self._cross_entropy(logits, labels, reduction="sum")
        likeliest, labels = _likeliest(logits), classes_of(labels, logits)
        hits, count = likeliest == labels.unsqueeze(1), counted(labels).sum()
        sums = [loss, hits[:, 0].sum(), count, hits.sum() * has_top5, count * has_top5]
        return torch.cat(
            [torch.stack([*map(double, sums)]), _confusions(likeliest[:, 0], labels, logits.shape[1])]
        )

    def predict(self, model: nn.Module, batch: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the label (B,), if given, the most likely class (B,), and the probabilities (B, classes)."""
        inputs, labels = inputs_and_any_labels(batch)
        logits = logits_of(model(inputs))
        known = {} if labels is None else {"label": classes_of(labels, logits)}
        return known | {"prediction": _likeliest(logits)[:, 0], "probabilities": logits.softmax(dim=1)}

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, accuracy = (sums[:2] / sums[2]).tolist()  # NaN if all labels are ignored
        metrics = {"loss": loss, "accuracy": accuracy}
        return metrics | {"top5_accuracy": float(sums[3] / sums[4])} if sums[4] else metrics

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        assert evaluation.sums is not None
        confusions = evaluation.sums[5:]
        texts = {"eval/confusion": _table(confusions)} if len(confusions) else {}
        inputs, labels = (values[:32] for values in evaluation.batch)
        logits = logits_of(model(inputs))
        predicted, labels = _likeliest(logits)[:, 0].tolist(), classes_of(labels, logits)
        if inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or labels.ndim != 1:
            return Shown(texts)
        from trainer.tasks.pictures import captioned  # imports Pillow

        pairs = list(zip(labels.tolist(), predicted, strict=True))
        captions = [f"{label}" if label == guess else f"{label} as {guess}" for label, guess in pairs]
        correct = [label == guess for label, guess in pairs]
        return Shown(texts, {"eval/samples": captioned(inputs, captions, correct)})


def _confusions(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the flattened confusion matrix; empty for more than 20 classes or for labels per pixel."""
    if classes > _MAX_CONFUSION_CLASSES or labels.ndim != 1:
        return torch.zeros(0, dtype=torch.float64, device=for_sums(labels.device))
    is_class = counted(labels)
    where = torch.where(is_class, labels * classes + predicted, 0)
    ones = double(is_class)
    return ones.new_zeros(classes**2).index_add_(0, where.to(ones.device), ones)


def _table(confusions: Tensor) -> str:
    matrix = confusions.reshape(int(len(confusions) ** 0.5), -1).long().tolist()
    head = "| class \\ predicted | " + " | ".join(map(str, range(len(matrix)))) + " |"
    rows = [f"| **{k}** | " + " | ".join(map(str, row)) + " |" for k, row in enumerate(matrix)]
    return "\n".join([head, "|---" * (len(matrix) + 1) + "|", *rows])


def _likeliest(logits: Tensor) -> Tensor:
    """Return the five most likely classes in order or, for up to five classes, the most likely one."""
    return logits.topk(5 if logits.shape[1] > 5 else 1, dim=1).indices
