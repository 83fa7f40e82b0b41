"""A small vision transformer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.transformer import Block, check_sizes, initialise


class ViT(nn.Module):
    """A vision transformer with mean pooling, which maps (B, *input_shape) to logits (B, num_classes).

    Args:
        input_shape: channels, height and width of the images.
        patch_size: side of a patch in pixels; height and width must be multiples of it.
        dropout: probability of dropout after the embedding, in the attention, and on each residual branch.

    Raises:
        ValueError: a size is below 1, images can't be divided into patches, or width into heads.

    Source: A. Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; for mean pooling instead of a
    class token, L. Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 6,
        num_heads: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"patch_size": patch_size, "width": width, "depth": depth, "num_heads": num_heads}
        check_sizes(dropout, num_classes=num_classes, **sizes)
        channels, height, image_width = input_shape
        if height % patch_size or image_width % patch_size:
            raise ValueError(
                f"images of {height}x{image_width} pixels are not divisible into patches of "
                f"patch_size={patch_size}"
            )
        num_patches = (height // patch_size) * (image_width // patch_size)
        self.patch_embedding = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        self.position_embedding = nn.Parameter(torch.empty(num_patches, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        initialise(self, depth)
        nn.init.normal_(self.position_embedding, std=0.02)

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)  # (B, patches, width)
        x = self.dropout(patches + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))
