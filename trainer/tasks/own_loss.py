"""A task for models that compute their own loss, like Hugging Face models that get labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.accelerator import double
from trainer.errors import UserError
from trainer.tasks.cross_entropy import counted


class OwnLoss:
    """A task for models that compute their own loss.

    Batches are dicts of tensors (B, ...), which are passed to the model as keyword arguments. The model
    returns its loss in one of the forms that Hugging Face's trainer accepts: as the attribute or key
    ``loss``, as the first item of a tuple, or as the only output.

    The loss must be the mean over the batch's counted ``labels``: integers other than -100. If a batch has no
    labels, or labels of floats, each sample counts.

    Metrics: loss, the mean over all counted labels; and accuracy, if the model also returns ``logits`` (B,
    classes) as an attribute or key, and the labels are classes (B,).

    Args:
        shifted: whether the model ignores the first label of each sequence, like causal language models of
            Hugging Face. Required if labels are sequences.
    """

    metric_names = ("loss", "accuracy")

    def __init__(self, shifted: bool | None = None) -> None:
        self.shifted = shifted

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self._loss(self._output(model, batch))

    def weight(self, batch: dict[str, Tensor]) -> int | Tensor:
        labels = _as_keywords(batch).get("labels")
        if labels is None or labels.is_floating_point():
            return next(len(value) for value in batch.values() if isinstance(value, Tensor))
        if labels.ndim > 1 and self.shifted is None:
            raise UserError(
                f"the labels have the shape {tuple(labels.shape)}; set data.task.shifted=true for a causal "
                "language model, whose loss ignores the first label of each sequence, or "
                "data.task.shifted=false for other models"
            )
        return counted(labels[:, 1:] if labels.ndim > 1 and self.shifted else labels).sum()

    def eval_sums(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sums [loss, counted labels] or, if the model returns logits, [..., correct labels]."""
        output = self._output(model, batch)
        loss = double(self._loss(output))
        count = torch.as_tensor(self.weight(batch)).to(loss)
        sums = [torch.where(count > 0, loss * count, 0.0), count]  # without counted labels, the mean is NaN
        logits, labels = _logits(output), batch.get("labels")
        if logits is not None and labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            sums.append(double((logits.argmax(1) == labels).sum()))
        return torch.stack(sums)

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, _, *accuracy = (sums / sums[1]).tolist()
        return {"loss": loss} | ({"accuracy": accuracy[0]} if accuracy else {})

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return prediction (B,), probabilities (B, classes) and, if the batch has labels, label (B,)."""
        output, labels = self._output(model, batch), batch.get("labels")
        if (logits := _logits(output)) is None:
            raise UserError(
                "OwnLoss predicts classes from logits (B, classes), which this model does not return; "
                "return a dict of loss and logits from the model, or set data.task to your own task with a "
                "`predict` method"
            )
        known = {} if labels is None or labels.ndim != 1 else {"label": labels}
        return known | {"prediction": logits.argmax(1), "probabilities": logits.softmax(dim=1)}

    def _output(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return model(**_as_keywords(batch))

    def _loss(self, output: Any) -> Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            loss = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise UserError(
                f"expected the model's loss to be one number, got a {type(loss).__name__}{shape} from an "
                f"output of type {type(output).__name__}; return it as an attribute or a key `loss`, as "
                "the first item of a tuple, or as the only output, or set data.task to your own task"
            )
        return loss


def _as_keywords(batch: Any) -> Mapping[str, Tensor]:
    if isinstance(batch, Mapping):
        return batch
    raise UserError(
        f"a batch is a {type(batch).__name__}, but OwnLoss passes batches to the model as keyword arguments; "
        "return a dict for each sample of the dataset, or set data.task to another task, such as "
        "trainer.tasks.Classification for inputs and labels"
    )


def _logits(output: Any) -> Tensor | None:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits.float() if isinstance(logits, Tensor) and logits.ndim == 2 else None
