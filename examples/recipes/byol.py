"""BYOL: learns without labels; an online network predicts the output of a target network for another view."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Byol(nn.Module):
    """Returns two predictions and two targets for two views (B, 1, 8, 8), or the embedding of one view."""

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        self.online = network(64, width, dimensions)
        self.predictor = network(dimensions, width, dimensions)
        self.target = network(64, width, dimensions).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, one: Tensor, two: Tensor | None = None) -> Any:
        if two is None:
            return F.normalize(self.online[:3](one.flatten(1)), dim=1)
        both = torch.cat([one, two]).flatten(1)
        with torch.no_grad():
            targets = self.target(both)
        return self.predictor(self.online(both)).chunk(2), targets.chunk(2)


def network(inputs: int, width: int, outputs: int, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), norm(width), nn.ReLU(), nn.Linear(width, outputs))


class Follow:
    """Moves the target network toward the online network after each step, more slowly near the end.

    `neighbour_accuracy` is the fraction of samples whose nearest neighbor has the same label.
    """

    metric_names = ("neighbour_accuracy",)
    rate = 0.05

    def begin_step(self, step: int, last_step: int) -> None:
        self.rate = 0.05 * (1 - step / (last_step + 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (one, two), (of_one, of_two) = model(view(batch[0]), view(batch[0]))
        alike = F.cosine_similarity(one, of_two) + F.cosine_similarity(two, of_one)
        return 2 - alike.mean()

    def end_step(self, model: Any, step: int) -> None:
        for target, online in zip(model.target.parameters(), model.online.parameters(), strict=True):
            target.lerp_(online, self.rate)

    def rows(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"embedding": model(batch[0]), "label": batch[1]}

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        alike = rows["embedding"] @ rows["embedding"].T
        nearest = alike.fill_diagonal_(-1).argmax(1)
        return {"neighbour_accuracy": float((rows["label"][nearest] == rows["label"]).double().mean())}


def view(images: Tensor) -> Tensor:
    """Return each image shifted by at most one pixel, with noise."""
    shifts = torch.randint(-1, 2, (len(images), 2)).tolist()
    moved = [image.roll(shift, (1, 2)) for image, shift in zip(images, map(tuple, shifts), strict=True)]
    return torch.stack(moved) + 0.2 * torch.randn_like(images)
