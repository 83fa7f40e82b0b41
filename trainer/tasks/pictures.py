"""Grids of sample images with captions, drawn with Pillow."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

_COLUMNS = 8
_TILE = 64  # minimum size in pixels
_CAPTION = 14  # height in pixels
_CORRECT, _WRONG = (0, 110, 0), (190, 0, 0)  # colours of captions


def captioned(images: Tensor, captions: Sequence[str], correct: Sequence[bool]) -> Tensor:
    """Arrange images (N, 1 or 3, H, W) in rows of 8, with captions in green if `correct`, else in red."""
    pixels = images.detach().float().cpu()
    low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
    pixels = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    scale = max(1, -(-_TILE // max(pixels.shape[2:])))
    pixels = F.interpolate(pixels, scale_factor=scale).expand(-1, 3, -1, -1).round().to(torch.uint8)
    height, width = pixels.shape[2], max(pixels.shape[3], _TILE)
    rows = -(-len(pixels) // _COLUMNS)
    canvas = Image.new("RGB", (_COLUMNS * width, rows * (height + _CAPTION)), "white")
    draw = ImageDraw.Draw(canvas)
    for number, (tile, caption, is_correct) in enumerate(zip(pixels, captions, correct, strict=True)):
        x, y = number % _COLUMNS * width, number // _COLUMNS * (height + _CAPTION)
        canvas.paste(Image.fromarray(tile.permute(1, 2, 0).contiguous().numpy()), (x, y))
        draw.text((x + 2, y + height + 1), caption, fill=_CORRECT if is_correct else _WRONG)
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)
