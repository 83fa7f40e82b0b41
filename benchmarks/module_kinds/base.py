"""Base class of the unusual modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

KINDS: dict[str, Callable[[], nn.Module]] = {}


class Kind(nn.Module):
    """Two layers, and between them an unusual feature that gets hidden states (B, 8)."""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.make()

    def make(self) -> None:
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Any:
        return self.last(self.middle(torch.tanh(self.first(rows))))

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x)
