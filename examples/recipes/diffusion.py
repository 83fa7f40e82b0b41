"""Diffusion: a network learns to remove noise from digits; generated digits are shown in TensorBoard."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.tasks import Evaluation, Shown


class Denoiser(nn.Module):
    """Returns velocities (B, 64) for noisy images (B, 64), their fractions of noise (B,) and classes (B,)."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.classes, self.time = nn.Embedding(num_classes, width), nn.Linear(16, width)
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
                                                  nn.Linear(width, width)) for _ in range(3))  # fmt: skip

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        angles = time[:, None] * math.pi * 2.0 ** torch.arange(8, device=time.device)
        hidden = (
            self.first(images) + self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.classes(labels)
        )
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class Flow:
    """Rectified flow: on the straight line between an image and noise, the velocity is constant."""

    metric_names = ("loss",)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch[0].flatten(1) * 2 - 1, batch[1]
        noise, time = torch.randn_like(images), torch.rand(len(images), device=images.device)
        between = torch.lerp(images, noise, time[:, None])
        return F.mse_loss(model(between, time, labels), noise - images)

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        samples = len(batch[1])
        return torch.stack([self.loss(model, batch).double() * samples, batch[1].new_tensor(samples)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        return {"loss": float(sums[0] / sums[1])}

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        """Return two generated digits of each class."""
        labels = torch.arange(20, device=evaluation.batch[1].device) % 10
        return Shown(images={"eval/made": torch.cat(list(sample(model, labels)), 1).unsqueeze(0)})


def sample(model: nn.Module, labels: Tensor, steps: int = 20) -> Tensor:
    """Generate images (B, 8, 8) of the classes `labels` from noise."""
    images = torch.randn(len(labels), 64, device=labels.device)
    for time in torch.linspace(1, 1 / steps, steps):
        images = images - model(images, time.to(images).expand(len(images)), labels) / steps
    return (images.view(-1, 8, 8) / 2 + 0.5).clamp(0, 1)
