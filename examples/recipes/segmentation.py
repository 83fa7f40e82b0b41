"""Segmentation: a class for each pixel. The pictures are two digits, side by side."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.data.digits import Digits
from trainer.tasks import Evaluation, Shown

COLOURS = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.4, 0.1], [0.1, 0.5, 0.9]])


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures (1, 8, 16) and a class for each pixel: 0 background, 1 an even digit, 2 an odd one."""

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
    """(B, 1, H, W) to a score for each class and pixel, (B, classes, H, W)."""

    def __init__(self, num_classes: int, width: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
        for dilation in (1, 2, 4):
            layers += [nn.BatchNorm2d(width), nn.GELU()]
            layers += [nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation)]
        super().__init__(*layers, nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, num_classes, 1))


class Pixels:
    """Cross entropy over the pixels that are not -100; the mean of the classes' intersection over union."""

    metric_names = ("loss", "miou")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """[loss, pixels], then of each class the pixels that are it and taken for it, and either."""
        scores, labels = model(batch[0]), batch[1]
        counts = labels != -100
        taken, given = (F.one_hot(of[counts], scores.shape[1]) for of in (scores.argmax(1), labels))
        loss = F.cross_entropy(scores, labels, reduction="sum")
        return torch.cat([torch.stack([loss, counts.sum()]), (taken & given).sum(0), (taken | given).sum(0)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        both, either = sums[2:].chunk(2)
        return {"loss": float(sums[0] / sums[1]), "miou": float((both / either.clamp(min=1)).mean())}

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        masks = model(evaluation.batch[0][:8]).argmax(1).flatten(0, 1).cpu()
        return Shown(images={"eval/masks": COLOURS[masks].permute(2, 0, 1)})
