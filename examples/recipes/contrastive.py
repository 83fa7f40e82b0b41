"""SimCLR: two views of an image shall find each other among those of the whole batch, of all ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from byol import Follow, network, view
from torch import Tensor, nn

from trainer import gather


class Encoder(nn.Module):
    """Images (B, 1, 8, 8) to embeddings of length 1; in evaluation those before the last layers."""

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        self.network = network(64, width, dimensions, nn.LayerNorm)  # of a sample: the same on any rank

    def forward(self, images: Tensor) -> Tensor:
        layers = self.network if self.training else self.network[:3]
        return F.normalize(layers(images.flatten(1)), dim=1)


class Contrast:
    """Each sample's first view is compared with the second views of all ranks, and the other way round."""

    metric_names = Follow.metric_names
    rows, summarise_rows = Follow.rows, Follow.summarise_rows

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        one, two = model(torch.cat([view(batch[0]), view(batch[0])])).chunk(2)
        ones, first = gather(one)
        twos, _ = gather(two)
        wanted = first + torch.arange(len(one), device=one.device)
        scores = [one @ twos.T, two @ ones.T]
        return torch.stack([F.cross_entropy(score / self.temperature, wanted) for score in scores]).mean()
