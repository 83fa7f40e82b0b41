"""A model and a dataset that draw random numbers everywhere, which makes an exact resume hard."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """36 samples of 10 numbers in 4 classes, with new noise added at each read."""

    num_classes = 4
    input_shape = (10,)

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn(36, 10, generator=generator)
        self.labels = torch.randint(4, (36,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(10), self.labels[index]


class DropoutNet(nn.Module):
    """Dropout in front of batch norm, so that its running statistics depend on the generators too."""

    gain: Tensor

    def __init__(self, num_classes: int, norm: bool = True, hook: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 40), nn.Linear(40, 40)
        self.norm = nn.BatchNorm1d(40) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(40, num_classes)
        if hook:
            self.first.weight.register_hook(lambda gradient: gradient * 2)
        self.register_buffer("gain", torch.ones(()), persistent=False)  # no part of its state_dict

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return [self.first, self.second, self.head]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain *= 0.99
        x = self.norm(self.dropout(torch.relu(self.first(self.gain * x))))
        return self.head(self.dropout(torch.relu(self.second(x))))
