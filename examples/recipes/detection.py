"""Object detection: finds and classifies digits in images; a loss with three parts, batches with lists."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.data.digits import Digits


class Placed(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images (1, 24, 24) with one or two digits, their boxes (N, 4: x, y, width, height) and labels (N,)."""

    num_classes = 10

    def __init__(self, split: str) -> None:
        self.digits, self.held_out = Digits(split), split == "eval"

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(index) if self.held_out else None
        picture, boxes, labels = torch.zeros(1, 24, 24), [], []
        for number in range(1 + index % 2):
            image, label = self.digits[(index + 11 * number) % len(self)]
            x, y = (int(torch.randint(0, high, (), generator=draw)) for high in (17, 5))
            y += 12 * number
            picture[:, y : y + 8, x : x + 8] = image
            boxes.append([x, y, 8.0, 8.0])
            labels.append(label)
        return picture, {"boxes": torch.tensor(boxes), "labels": torch.stack(labels)}


def collate(samples: list[Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Stack the images, and keep the targets in a list, because images have different numbers of boxes."""
    return torch.stack([picture for picture, _ in samples]), [target for _, target in samples]


class Grid(nn.Sequential):
    """A network from images (B, 1, 24, 24) to predictions (B, 1 + 4 + classes, 6, 6).

    For each of 6 x 6 cells: a score for the center of a digit being in the cell, its box, and class scores.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        def step(inputs: int, stride: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, width, 3, stride, 1), nn.BatchNorm2d(width), nn.GELU()]

        parts = [*step(1, 1), *step(width, 2), *step(width, 2), *step(width, 1)]
        super().__init__(*parts, nn.Conv2d(width, 5 + num_classes, 1))


class Boxes:
    """Finds digits by the cells of their centers; `found` is the fraction with the right cell and class."""

    metric_names = ("loss", "found")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        made, (row, cell), boxes, labels = self._matched(model, batch)
        there = torch.zeros_like(made[:, 0])
        there[row, cell[1], cell[0]] = 1
        mine = made[row, :, cell[1], cell[0]]
        parts = {
            "there": F.binary_cross_entropy_with_logits(made[:, 0], there),
            "box": F.l1_loss(mine[:, 1:5], boxes / 24),
            "class": F.cross_entropy(mine[:, 5:], labels),
        }
        return 4 * parts["there"] + parts["box"] + parts["class"], parts

    def weight(self, batch: Any) -> int:
        return len(batch[0])

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sums [loss, samples, digits found, digits]."""
        made, (row, cell), _, labels = self._matched(model, batch)
        mine = made[row, :, cell[1], cell[0]]
        found = ((mine[:, 0] > 0) & (mine[:, 5:].argmax(1) == labels)).sum()
        count, digits = (found.new_tensor(len(of)) for of in (batch[0], labels))
        loss, _ = self.loss(model, batch)
        return torch.stack([number.double() for number in (loss * count, count, found, digits)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        return {"loss": float(sums[0] / sums[1]), "found": float(sums[2] / sums[3])}

    def _matched(self, model: nn.Module, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Return the model's output and, for each digit, (image index, cell x and y), box and label."""
        pictures, targets = batch
        boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
        row = torch.cat([torch.full((len(t["labels"]),), i) for i, t in enumerate(targets)]).to(labels.device)
        cell = ((boxes[:, :2] + boxes[:, 2:] / 2) / 4).long().T
        return model(pictures), (row, cell), boxes, labels
