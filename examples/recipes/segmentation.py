"""Segmentation: predicts a class for each pixel of images that show two digits side by side."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.data.digits import Digits
from trainer.tasks import Evaluation, Shown

COLOURS = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.4, 0.1], [0.1, 0.5, 0.9]])


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 8, 16), and a class per pixel: 0 for background, 1 for an even digit, 2 for an odd digit."""

    num_classes = 3

    def __init__(self, split: str) -> None:
        self.digits = Digits(split)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pair = [self.digits[index], self.digits[(index * 7 + 3) % len(self)]]
        masks = [(image[0] > 0.3) * (1 + label % 2) for image, label in pair]
        return torch.cat([image for image, _ in pair], 2), torch.cat(masks, 1)


class Net(nn.Sequential):
    """A network from images (B, 1, H, W) to a score for each class and pixel (B, classes, H, W)."""

    def __init__(self, num_classes: int, width: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
        for dilation in (1, 2, 4):
            layers += [nn.BatchNorm2d(width), nn.GELU()]
            layers += [nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation)]
        super().__init__(*layers, nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, num_classes, 1))


class Pixels:
    """Cross entropy over pixels whose label isn't -100; `miou` is the mean IoU of the classes."""

    metric_names = ("loss", "miou")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Return sums: [loss, pixels], then each class's intersection, then each class's union, in pixels."""
        scores, labels = model(batch[0]), batch[1]
        counts = labels != -100
        predicted, given = (F.one_hot(each[counts], scores.shape[1]) for each in (scores.argmax(1), labels))
        loss = F.cross_entropy(scores, labels, reduction="sum")
        intersection, union = (predicted & given).sum(0), (predicted | given).sum(0)
        return torch.cat([torch.stack([loss, counts.sum()]), intersection, union])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        intersection, union = sums[2:].chunk(2)
        return {"loss": float(sums[0] / sums[1]), "miou": float((intersection / union.clamp(min=1)).mean())}

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        masks = model(evaluation.batch[0][:8]).argmax(1).flatten(0, 1).cpu()
        return Shown(images={"eval/masks": COLOURS[masks].permute(2, 0, 1)})
