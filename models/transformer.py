"""The pre-norm transformer block of the GPT and the vision transformer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.packed import attend_within


class Past:
    """The key-value cache of one attention layer, for at most ``size`` tokens.

    The first call allocates 2 x B x width x size numbers. Use it within `torch.no_grad`.
    """

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self._memory: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of n tokens, each (B, heads, n, width / heads), and return the cache."""
        if self._memory is None:
            self._memory = key.new_empty(2, *key.shape[:2], self.size, key.shape[3])
        start, self.length = self.length, self.length + key.shape[2]
        keys, values = self._memory[:, :, :, : self.length]
        keys[:, :, start:], values[:, :, start:] = key, value
        return keys, values


class SelfAttention(nn.Module):
    """Multi-head self-attention on (B, T, width), with torch's fused kernels where possible.

    With ``past``, the first call gets a prompt of T tokens, and each later call the next token. ``mask``
    replaces ``causal``: a mask (B, 1, T, T), True where one token attends to another, or the offsets for
    `attend_within`.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} is not divisible by num_heads={num_heads}")
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, past: Past | None = None, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        parts = [
            part.view(batch, length, self.num_heads, -1) for part in self.query_key_value(x).chunk(3, dim=-1)
        ]
        query, key, value = parts
        if mask is not None and mask.dtype != torch.bool:
            return self.output(attend_within(query, key, value, mask).flatten(2))
        query, key, value = (part.transpose(1, 2) for part in parts)
        causal = self.causal and mask is None
        if past is not None:
            assert past.length == 0 or length == 1, "several tokens after a cache would need a mask"
            causal = past.length == 0  # a single token attends to all cached tokens
            key, value = past.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Sequential):
    """Two linear layers with an inner width of 4 * width, applied to each position.

    The activation is the exact GELU, because GPT-2's tanh approximation takes three times as long on a CPU.
    """

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)), each with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, dropout, causal)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, past: Past | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), past, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def check_sizes(dropout: float, **sizes: int) -> None:
    """Raise ValueError for a size below 1 or a dropout outside [0, 1)."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: expected a number from 0 to below 1")


def initialise(model: nn.Module, depth: int) -> None:
    """Initialize like GPT-2: weights N(0, 0.02), biases 0, and residual projections scaled by depth.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Block):
            for last in (module.attention.output, module.feed_forward[-1]):
                nn.init.normal_(last.weight, std=0.02 / (2 * depth) ** 0.5)  # type: ignore[arg-type]
