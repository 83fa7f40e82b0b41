"""A residual network with batch norm, small enough for eight ranks on two cores."""

from torch import Tensor, nn
from torch.nn import functional as F


class SmallResNet(nn.Module):
    """A residual network for images of 8 x 8 with one channel."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images.view(-1, 1, 8, 8))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second_norm(self.second(F.relu(self.first_norm(self.first(x))))))
