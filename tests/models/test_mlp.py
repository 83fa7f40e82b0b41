import torch
from torch import nn

from models.mlp import MLP


def test_shapes_and_units() -> None:
    model = MLP((1, 8, 8), 10, hidden=[32, 16])
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert [tuple(unit.weight.shape) for unit in model.fsdp_units] == [(32, 64), (16, 32), (10, 16)]
    assert sum(isinstance(layer, nn.ReLU) for layer in model) == 2
    assert MLP((4,), 2, hidden=())(torch.randn(5, 4)).shape == (5, 2)
