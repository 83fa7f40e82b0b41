"""A model that computes its own loss, as Hugging Face's do when given labels."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.tasks.cross_entropy import counted


class OwnLoss:
    """Batches are dicts of tensors (B, ...), the model's keywords; it returns its loss.

    As the trainer of Hugging Face takes it: in ``loss``, an attribute or a key, first in a tuple, or alone.

    It must be the mean over the batch's counted ``labels``: integers other than -100. In a batch
    without labels, or with floats, each sample counts.

    Evaluation: the mean of the loss over all counted labels.

    Args:
        shifted: whether the model leaves out the first label of each sequence, as causal language models of
            Hugging Face do, since no token comes before it. Required if labels are sequences.
    """

    metric_names = ("loss",)

    def __init__(self, shifted: bool | None = None) -> None:
        self.shifted = shifted

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch)
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

    def weight(self, batch: dict[str, Tensor]) -> int | Tensor:
        labels = batch.get("labels")
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
        """[loss, counted labels]"""
        loss = self.loss(model, batch).double()
        count = torch.as_tensor(self.weight(batch)).to(loss)
        return torch.stack([torch.where(count > 0, loss * count, 0.0), count])  # a mean over no label is NaN

    def summarise(self, sums: Tensor) -> dict[str, float]:
        return {"loss": float(sums[0] / sums[1])}
