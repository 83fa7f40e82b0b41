"""A model that computes its own loss, as Hugging Face's do when they are given labels."""

from typing import Any

import torch
from torch import Tensor, nn


class OwnLoss:
    """Batches are dicts of tensors (B, ...), the model's keywords; it returns an object with ``loss``.

    Evaluation: the mean of the loss over batches, each weighing as many as its samples. That is the mean over
    samples, whatever the batches, for a loss that is one; a mean over tokens depends on who is batched with
    whom where sequences are not equally long.
    """

    figures = ("loss",)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def eval_sums(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[loss, samples]"""
        loss, num_samples = self.loss(model, batch).double(), _num_samples(batch)
        return torch.stack([loss * num_samples, torch.full_like(loss, num_samples)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        total, num_samples = sums.tolist()
        return {"loss": total / num_samples}


def _num_samples(batch: dict[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor))
