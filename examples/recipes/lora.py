"""LoRA without PEFT: a GPT from another run learns new text by training two small matrices per layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gpt import GPT


class LoRA(nn.Module):
    """A frozen linear layer, plus a trainable product of two low-rank matrices.

    Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer  # `model.init_from` ignores `base_layer` in parameter names
        self.down = nn.Parameter(torch.randn(rank, base_layer.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base_layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + F.linear(F.linear(x, self.down), self.up)


def adapted(rank: int, **settings: Any) -> GPT:
    model = GPT(**settings).requires_grad_(False)
    for block in model.blocks:
        block.attention.query_key_value = LoRA(block.attention.query_key_value, rank)
        block.feed_forward[0] = LoRA(block.feed_forward[0], rank)
    return model
