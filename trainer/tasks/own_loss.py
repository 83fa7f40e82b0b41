"""A model that computes its own loss, as Hugging Face's do when given labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.tasks.cross_entropy import counted


class OwnLoss:
    """Batches are dicts of tensors (B, ...), the model's keywords; it returns its loss.

    As the trainer of Hugging Face takes it: in ``loss``, an attribute or a key, first in a tuple, or alone.

    It must be the mean over the batch's counted ``labels``: integers other than -100. In a batch
    without labels, or with floats, each sample counts.

    Evaluation: the mean of the loss over all counted labels; and accuracy, if the model also returns
    ``logits`` (B, classes), an attribute or a key, and labels are classes (B,).

    Args:
        shifted: whether the model leaves out the first label of each sequence, as causal language models of
            Hugging Face do, since no token comes before it. Required if labels are sequences.
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
                f"the labels are sequences, {tuple(labels.shape)}; set data.task.shifted=true for a causal "
                "language model, which leaves the first label of each sequence out of its loss, or "
                "data.task.shifted=false for other models"
            )
        return counted(labels[:, 1:] if labels.ndim > 1 and self.shifted else labels).sum()

    def eval_sums(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[loss, counted labels], and with logits the number of correct ones."""
        output = self._output(model, batch)
        loss = self._loss(output).double()
        count = torch.as_tensor(self.weight(batch)).to(loss)
        sums = [torch.where(count > 0, loss * count, 0.0), count]  # a mean over no label is NaN
        logits, labels = _logits(output), batch.get("labels")
        if logits is not None and labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            sums.append((logits.argmax(1) == labels).sum().double())
        return torch.stack(sums)

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, _, *accuracy = (sums / sums[1]).tolist()
        return {"loss": loss} | ({"accuracy": accuracy[0]} if accuracy else {})

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """prediction (B,), the most likely class, and probabilities (B, classes); label (B,) if known.

        Raises:
            UserError: the model returns no logits of this shape.
        """
        output, labels = self._output(model, batch), batch.get("labels")
        if (logits := _logits(output)) is None:
            raise UserError(
                "OwnLoss predicts classes from logits (B, classes), which this model does not return; let it "
                "return a dict of loss and logits, or give a task of your own (data.task) a method predict"
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
                f"the model returned a {type(output).__name__}, and in the place of its loss a "
                f"{type(loss).__name__}{shape}; OwnLoss needs one number: loss as attribute or key, first in "
                "a tuple, or alone. Another output is for a task of your own (data.task)"
            )
        return loss


def _as_keywords(batch: Any) -> Mapping[str, Tensor]:
    if isinstance(batch, Mapping):
        return batch
    raise UserError(
        f"a batch is a {type(batch).__name__}, but OwnLoss passes it to the model as keywords: let the "
        "dataset return a dict for each sample, or set data.task to a task that takes it, as "
        "trainer.tasks.Classification takes inputs and labels"
    )


def _logits(output: Any) -> Tensor | None:
    """(B, classes), if the model returned any as an attribute or a key."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits.float() if isinstance(logits, Tensor) and logits.ndim == 2 else None
