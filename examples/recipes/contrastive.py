"""SimCLR: each view of an image is matched to the other view, among the views of all ranks' images."""

from typing import Any

import torch
import torch.nn.functional as F
from byol import Follow, network, view
from torch import Tensor, nn

from trainer import gather


class Encoder(nn.Module):
    """Returns embeddings of norm 1 for images (B, 1, 8, 8); in evaluation, without the last layer."""

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        self.network = network(64, width, dimensions, nn.LayerNorm)  # independent of the rank's other samples

    def forward(self, images: Tensor) -> Tensor:
        layers = self.network if self.training else self.network[:3]
        return F.normalize(layers(images.flatten(1)), dim=1)


class Contrast:
    """Compares each sample's first view with the second views of all ranks, and vice versa."""

    metric_names = Follow.metric_names
    rows, summarise_rows = Follow.rows, Follow.summarise_rows

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        one, two = model(torch.cat([view(batch[0]), view(batch[0])])).chunk(2)
        ones, first = gather(one)
        twos, _ = gather(two)
        targets = first + torch.arange(len(one), device=one.device)
        scores = [one @ twos.T, two @ ones.T]
        return torch.stack([F.cross_entropy(score / self.temperature, targets) for score in scores]).mean()
