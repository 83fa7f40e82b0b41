"""Distillation: a small student learns from labels and from the probabilities of a trained teacher."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainer
from models.mlp import MLP
from trainer.tasks import Classification


class Pair(nn.Module):
    """The logits of the student; with both, also those of its frozen teacher, the model of another run."""

    def __init__(self, teacher: str, hidden: list[int], num_classes: int, input_shape: list[int]) -> None:
        super().__init__()
        self.student = MLP(input_shape, num_classes, hidden)
        self.teacher = trainer.load_model(teacher).requires_grad_(False)

    def forward(self, images: Tensor, both: bool = False) -> Any:
        if not both:
            return self.student(images)
        with torch.no_grad():
            self.teacher.eval()
            wanted = self.teacher(images)
        return self.student(images), wanted


class Distil(Classification):
    """Beside the labels, the teacher's probabilities at a temperature; evaluated as a classification."""

    temperature = 3.0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits, wanted = (of / self.temperature for of in model(batch[0], both=True))
        labels = F.cross_entropy(logits * self.temperature, batch[1])
        teacher = F.kl_div(logits.log_softmax(1), wanted.softmax(1), reduction="batchmean")
        loss = 0.1 * labels + 0.9 * self.temperature**2 * teacher
        return loss, {"labels": labels, "teacher": teacher}
