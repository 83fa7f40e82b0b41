"""Models that change buffers or use random numbers in unusual ways."""

import random

import torch
from torch import Tensor, nn


class _Two(nn.Module):
    """Two layers; a subclass changes the code between them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, num_classes)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class Codebook(_Two):
    """Changes its buffer through `.data`, which torch does not count as a new version."""

    code: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("code", torch.zeros(8))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.code.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.code


class SkipsLayers(_Two):
    """Uses random layers in each pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def between(self, x: Tensor) -> Tensor:
        for layer in self.middle:
            if not self.training or random.random() < 0.4:
                x = x + torch.tanh(layer(x))
        return x
