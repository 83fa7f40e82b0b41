"""Predict how many bikes are rented per hour: a CSV dataset, a model and a metric.

python bikes.py          writes bikes.csv, with 4,000 rows of synthetic data
"""

import csv
import math
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.tasks import Regression

TARGET = "rented"


class Table(TensorDataset):
    """The normalized columns of a CSV file; the last fifth of the rows is for validation."""

    def __init__(self, path: str, target: str, split: str) -> None:
        with Path(path).open(newline="") as file:
            rows = list(csv.DictReader(file))
        inputs = torch.tensor([[float(row[name]) for name in row if name != target] for row in rows])
        targets = torch.tensor([float(row[target]) for row in rows])
        held_out = len(rows) // 5
        known = inputs[:-held_out]
        inputs = (inputs - known.mean(0)) / known.std(0)
        part = slice(None, -held_out) if split == "train" else slice(-held_out, None)
        super().__init__(inputs[part], targets[part])
        self.input_shape = inputs.shape[1:]


class Net(nn.Sequential):
    """A network with two hidden layers, from (B, columns) to (B, 1)."""

    def __init__(self, input_shape: tuple[int, ...], width: int) -> None:
        super().__init__(
            nn.Linear(math.prod(input_shape), width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.append(nn.Linear(width, 1))


class Within(Regression):
    """Regression that also reports the fraction of predictions with an error of at most `tolerance`."""

    metric_names = (*Regression.metric_names, "within")

    def __init__(self, tolerance: float, loss: str = "mse") -> None:
        super().__init__(loss)
        self._tolerance = tolerance

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sums [predictions within the tolerance, samples, sums of Regression]."""
        shown = self.predict(model, batch)
        near = (shown["prediction"] - shown["target"]).abs() <= self._tolerance
        own = torch.stack([near.sum().double(), near.new_tensor(near.numel(), dtype=torch.float64)])
        return torch.cat([own, super().eval_sums(model, batch)])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        near, samples = sums[:2].tolist()
        return {**super().summarise(sums[2:]), "within": near / samples}


def write(path: Path, rows: int = 4000) -> None:
    """Write the table; every call writes the same rows."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hour", "degrees", "rain_mm", "weekend", TARGET])
        for _ in range(rows):
            hour, degrees, weekend = draw.randrange(24), draw.uniform(-5, 35), draw.random() < 2 / 7
            rain = max(0.0, draw.gauss(-1, 2))
            peak = math.exp(-((hour - 8) ** 2) / 4) + 1.3 * math.exp(-((hour - 18) ** 2) / 6)
            day = math.exp(-((hour - 14) ** 2) / 18) if weekend else peak
            rented = 300 * day * math.exp(-(((degrees - 22) / 14) ** 2)) / (1 + rain)
            table.writerow(
                [hour, round(degrees, 1), round(rain, 1), int(weekend), round(rented + draw.gauss(0, 8), 1)]
            )


if __name__ == "__main__":
    write(Path(__file__).parent / "bikes.csv")
