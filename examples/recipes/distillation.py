"""Distillation: a small student learns from labels and from the probabilities of a trained teacher."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainer
from models.mlp import MLP
from trainer.tasks import Classification


class Pair(nn.Module):
    """A student, and its frozen teacher from another run.

    Returns the student's logits; with `both=True`, also the teacher's.
    """

    def __init__(self, teacher: str, hidden: list[int], num_classes: int, input_shape: list[int]) -> None:
        super().__init__()
        self.student = MLP(input_shape, num_classes, hidden)
        self.teacher = trainer.load_model(teacher).requires_grad_(False)

    def forward(self, images: Tensor, both: bool = False) -> Any:
        if not both:
            return self.student(images)
        with torch.no_grad():
            self.teacher.eval()
            teacher = self.teacher(images)
        return self.student(images), teacher


class Distil(Classification):
    """Classification that trains on the labels and on the teacher's probabilities at a temperature."""

    temperature = 3.0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits, targets = (each / self.temperature for each in model(batch[0], both=True))
        labels = F.cross_entropy(logits * self.temperature, batch[1])
        teacher = F.kl_div(logits.log_softmax(1), targets.softmax(1), reduction="batchmean")
        loss = 0.1 * labels + 0.9 * self.temperature**2 * teacher
        return loss, {"labels": labels, "teacher": teacher}
