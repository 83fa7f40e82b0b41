"""A decoder-only transformer after GPT-2, with tied token embeddings."""

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
    """Tokens (B, T) int64 -> logits (B, T, vocab_size), at t from the tokens 0..t alone; T <= block_size.

    Args:
        size: a row of SIZES; width, depth and num_heads replace its values if given.
        dropout: after the embeddings, in the attention and on each residual branch.
        vocab_multiple: pad the matrix product that computes the logits to a multiple of this many columns,
            since a GPU takes longer for 50,257 than for 50,304. The padding is zeros, created for the product
            only, and not part of the logits, the parameters or a checkpoint.
        border: the token that ends each document. Documents of a sequence then do not attend to each other,
            and the positions of each begin at 0: its logits are those of the document alone. See
            `models.packed` for which kernel computes them.

    Raises:
        ValueError: a size unknown or below 1, a width that the heads do not divide, a sequence too long.

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
            raise ValueError(f"border={border} is not one of the {vocab_size} tokens")
        if size not in SIZES:
            raise ValueError(f"size={size} is not one of {', '.join(SIZES)}")
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
        """The cache for ``forward`` on consecutive parts of a sequence: each token is computed once."""
        return [Past(self.block_size) for _ in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        cache: Sequence[Past] = (),
        targets: Tensor | None = None,
        reduction: str = "mean",
        chunks: bool = False,
    ) -> Tensor:
        """With a ``cache``, ``tokens`` continue where the last call ended: a prompt, then one at a time.

        With ``targets`` (B, T), returns their cross entropy, so that a compiler sees all of it. With
        ``chunks``, never holds all logits at once, using F.linear_cross_entropy if torch has it.
        """
        begin = cache[0].length if cache else 0
        end = begin + tokens.shape[1]
        if end > self.block_size:
            raise ValueError(f"a sequence of {end} tokens is longer than block_size={self.block_size}")
        x, mask = self.token_embedding(tokens), None
        positions = torch.arange(begin, end, device=tokens.device)
        if self.border is not None:
            if cache:
                raise ValueError(f"with border={self.border} a sequence is computed whole, without a cache")
            varlen = takes_varlen(x, self._head_size, self.dropout.p if self.training else 0.0)
            positions, mask = documents(tokens, self.border, varlen)
        x = self.dropout(x + self.position_embedding(positions))
        for number, block in enumerate(self.blocks):
            x = block(x, cache[number] if cache else None, mask)
        # Tied: the transposed embedding. Using the tensor itself, without a second module, keeps one entry in
        # the state dict and one owner under FSDP.
        x, weight = self.norm(x), self.token_embedding.weight
        if self._padding:
            weight = F.pad(weight, (0, 0, 0, self._padding))
        if chunks and targets is not None and not x.is_meta:  # on meta only shapes matter
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
    """Cross entropy of x (B, T, width) times weight (classes, width) transposed, in fp32.

    Computes some rows of logits at a time, with their gradient, so never holds B x T x classes numbers. Rows
    of ``weight`` from ``num_classes`` on are padding, which is never a target and gets no gradient.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # it does not apply within this function
        x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
    padding = None
    if len(weight) > num_classes:
        padding = weight.new_zeros(len(weight))
        padding[num_classes:] = -torch.inf
    if reduction == "mean":  # without labels its gradient would be NaN times 0; any divisor works
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
