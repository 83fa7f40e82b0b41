"""A decoder-only transformer like GPT-2, with tied input and output embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.packed import documents, takes_varlen
from models.transformer import Block, Past, check_sizes, initialise

SIZES = {  # width, depth, heads
    "gpt-micro": (128, 4, 4),
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}


class GPT(nn.Module):
    """GPT-2, which maps tokens (B, T), int64, to logits (B, T, vocab_size), for T up to block_size.

    Args:
        vocab_size: number of tokens in the vocabulary.
        block_size: maximum length of a sequence.
        size: a key of SIZES; width, depth and num_heads override its values.
        dropout: probability of dropout after the embeddings, in the attention, and on each residual branch.
        vocab_multiple: compute the logits with a weight matrix that is padded with zeros to a multiple of
            this number of rows, because a GPU takes longer for 50,257 than for 50,304. The padding is not
            part of the logits, the parameters or a checkpoint.
        border: the token that ends each document. The documents of a sequence then do not attend to each
            other, and the positions of each start at 0, so the logits are those of separate documents. See
            `models.packed`.

    Raises:
        ValueError: a size is unknown or below 1, width is not divisible by num_heads, or a sequence is too
            long.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        size: str = "gpt-micro",
        width: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        dropout: float = 0.0,
        vocab_multiple: int = 1,
        border: int | None = None,
    ) -> None:
        super().__init__()
        if border is not None and not 0 <= border < vocab_size:
            raise ValueError(
                f"border={border}: expected the ID of the token that ends documents, 0 to {vocab_size - 1}"
            )
        if size not in SIZES:
            raise ValueError(f"size={size}: expected one of {', '.join(SIZES)}")
        named_width, named_depth, named_heads = SIZES[size]
        width = named_width if width is None else width
        depth = named_depth if depth is None else depth
        num_heads = named_heads if num_heads is None else num_heads
        check_sizes(
            dropout,
            vocab_size=vocab_size,
            block_size=block_size,
            width=width,
            depth=depth,
            num_heads=num_heads,
            vocab_multiple=vocab_multiple,
        )
        self.block_size, self.vocab_size, self.border = block_size, vocab_size, border
        self._padding, self._head_size = -vocab_size % vocab_multiple, width // num_heads
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        initialise(self, depth)

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def empty_cache(self) -> list[Past]:
        """Return an empty key-value cache for calls of ``forward`` on consecutive parts of a sequence."""
        return [Past(self.block_size) for _ in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        cache: Sequence[Past] = (),
        targets: Tensor | None = None,
        reduction: str = "mean",
        chunks: bool = False,
    ) -> Tensor:
        """Return logits or, given ``targets`` (B, T), their cross entropy.

        Args:
            cache: from `empty_cache`; the first call gets a prompt, and each later call the next token.
            reduction: mean, sum or none, for the cross entropy.
            chunks: compute the cross entropy from a few rows of logits at a time, to save memory.
        """
        start = cache[0].length if cache else 0
        end = start + tokens.shape[1]
        if end > self.block_size:
            raise ValueError(f"a sequence of {end} tokens exceeds block_size={self.block_size}")
        x, mask = self.token_embedding(tokens), None
        positions = torch.arange(start, end, device=tokens.device)
        if self.border is not None:
            if cache:
                raise ValueError(
                    f"a key-value cache is not supported with border={self.border}; call the model with the "
                    "whole sequence and no cache"
                )
            varlen = takes_varlen(x, self._head_size, self.dropout.p if self.training else 0.0)
            positions, mask = documents(tokens, self.border, varlen)
        x = self.dropout(x + self.position_embedding(positions))
        for number, block in enumerate(self.blocks):
            x = block(x, cache[number] if cache else None, mask)
        # Tied weights without a second module: the state dict has one entry, and one FSDP unit owns it.
        x, weight = self.norm(x), self.token_embedding.weight
        if self._padding:
            weight = F.pad(weight, (0, 0, 0, self._padding))
        if chunks and targets is not None and not x.is_meta:  # on meta, only shapes matter
            return chunked_cross_entropy(x, weight, targets, self.vocab_size, reduction)
        logits = F.linear(x, weight)
        if self._padding:
            logits = logits[..., : self.vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, num_classes: int, reduction: str
) -> Tensor:
    """Return the cross entropy, in fp32, of the logits ``x @ weight.T``, for x (B, T, width).

    Only a few rows of logits and of their gradients are in memory at a time. ``weight`` is (classes, width);
    its rows from ``num_classes`` on are padding without gradients.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # autocast does not apply to linear_cross_entropy
        x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
    padding = None
    if len(weight) > num_classes:
        padding = weight.new_zeros(len(weight))
        padding[num_classes:] = -torch.inf
    if reduction == "mean":  # without labels, the gradient would be NaN
        targets = targets.where((targets != -100).any(), 0)
    loss = F.linear_cross_entropy(
        x.flatten(0, 1),
        weight,
        targets.flatten(),
        linear_bias=padding,
        reduction=reduction,
        options=nn.LinearCrossEntropyOptions(),
    )
    return loss.float()
