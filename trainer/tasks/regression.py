"""Regression: prediction of one or more numbers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.accelerator import double
from trainer.errors import UserError
from trainer.tasks.cross_entropy import inputs_and_labels, logits_of

_LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


class Regression:
    """Prediction of one or more numbers.

    Batches are (inputs (B, ...), targets (B,) or (B, K)), and the model returns (B, K). Every target counts,
    including -100, and a target of NaN stops the run. For missing targets, write your own task that excludes
    them from `loss` and `weight`.

    Metrics: loss; rmse and mae, in the units of the targets; and r2, the explained fraction of the variance
    of all K targets around their means (0 for a model that predicts the means).

    Args:
        loss: mse | l1 | huber, averaged over all targets.
    """

    metric_names = ("loss", "rmse", "mae", "r2")

    def __init__(self, loss: str = "mse") -> None:
        if loss not in _LOSSES:
            raise ValueError(f"loss={loss}: expected one of {', '.join(_LOSSES)}")
        self._loss = _LOSSES[loss]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(*self._outputs(model, batch))

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sums [loss, squared error, absolute error, samples, K targets, squares of K targets]."""
        outputs, targets = map(double, self._outputs(model, batch))
        error = outputs - targets
        samples = torch.full_like(error[0, :1], len(error))
        totals = [self._loss(outputs, targets, reduction="sum"), error.square().sum(), error.abs().sum()]
        return torch.cat([torch.stack(totals), samples, targets.sum(0), targets.square().sum(0)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, squared, absolute, samples = sums[:4].tolist()
        targets, squares = sums[4:].chunk(2)
        count, variation = samples * len(targets), float((squares - targets.square() / samples).sum())
        return {
            "loss": loss / count,
            "rmse": math.sqrt(squared / count),
            "mae": absolute / count,
            "r2": 1 - squared / variation if variation > 0 else float("nan"),
        }

    def predict(self, model: nn.Module, batch: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the prediction and, if given, the target, each of shape (B, K)."""
        if isinstance(batch, Tensor):
            return {"prediction": logits_of(model(batch)).float().reshape(len(batch), -1)}
        outputs, targets = self._outputs(model, batch)
        return {"target": targets, "prediction": outputs}

    def _outputs(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return outputs and targets, both (B, K): torch would broadcast (B,) and (B, 1) to (B, B)."""
        inputs, targets = inputs_and_labels(batch)
        outputs, targets = (
            values.float().reshape(len(values), -1) for values in (logits_of(model(inputs)), targets)
        )
        if outputs.shape != targets.shape:
            raise UserError(
                f"the data has {targets.shape[1]} targets per sample, but the model returns "
                f"{outputs.shape[1]} numbers; set model.num_classes={targets.shape[1]}, or the equivalent "
                "setting of your model"
            )
        return outputs, targets
