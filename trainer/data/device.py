"""Transfer of batches to the device, where uint8 images are converted to float32 to save bandwidth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.errors import UserError
from trainer.tensors.nested import leaves, mapped, moves_itself


class Normalise:
    """Scales uint8 images (B, C, H, W) to [0, 1], in float32, subtracts `mean` and divides by `std`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self.mean = tuple(mean)
        # (x / 255 - mean) / std, folded into one multiplication and one addition
        self._scale, self._shift = (1 / (255 * stds)).to(device), (-means / stds).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        if len(self.mean) not in (1, images.shape[1]):
            raise UserError(
                f"data.images.mean={list(self.mean)} has {len(self.mean)} values, but the images have "
                f"{images.shape[1]} channels; set one value per channel, or one for all"
            )
        return (images * self._scale).add_(self._shift)


class ToDevice:
    """A callable that copies a batch (see `trainer.tensors.nested`) to the device and normalises its images.

    Copies from pinned memory are asynchronous. On a GPU they run on a separate stream, so that `ahead` can
    copy the next batch while the GPU computes gradients. The first uint8 tensor (B, C, H, W) of a batch
    contains its images.

    Args:
        channels_last: whether to convert 4-D tensors to this memory format.
        normalise: applied to the images; None leaves them unchanged.
    """

    def __init__(self, device: torch.device, channels_last: bool, normalise: Normalise | None) -> None:
        self.device, self.channels_last, self.normalise = device, channels_last, normalise
        self._stream = accelerator.stream(device)
        self._ahead: tuple[Any, Any] | None = None  # a batch, and its copy

    def ahead(self, batches: Sequence[Any]) -> None:
        """Start copying the first of the next `batches` to a GPU, which needs memory for another batch."""
        if is_accelerator(self.device) and batches and _moves_only_tensors(batches[0]):
            with accelerator.on(self._stream):
                self._ahead = batches[0], self._moved(batches[0])

    def __call__(self, batch: Any) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is batch:
            arrived = ahead[1]
        else:
            with accelerator.on(self._stream):
                arrived = self._moved(batch)
        if is_accelerator(self.device):
            reader = accelerator.current_stream(self.device)
            reader.wait_stream(self._stream)
            for value in leaves(arrived):  # allocated on the copy stream
                if isinstance(value, Tensor) and is_accelerator(value.device):  # it may still be on the CPU
                    accelerator.keep_for(value, reader)
        tensors = (leaf for leaf in leaves(arrived) if isinstance(leaf, Tensor))
        images = next((each for each in tensors if each.dtype == torch.uint8 and each.ndim == 4), None)
        if images is None or (normalise := self.normalise) is None:
            return arrived
        return mapped(arrived, lambda value: normalise(images) if value is images else value)

    def _moved(self, batch: Any) -> Any:
        arrived = mapped(batch, self._on_device)
        return mapped(arrived, _with_channels_last) if self.channels_last else arrived

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype == torch.float64 and not accelerator.has_float64(self.device):
                value = value.float()
            return value.to(self.device, non_blocking=True)
        if not moves_itself(value):
            return value
        moved = value.to(self.device)
        return value if moved is None else moved  # it moved its tensors in place


def _with_channels_last(value: Any) -> Any:
    are_images = isinstance(value, Tensor) and value.ndim == 4
    return value.contiguous(memory_format=torch.channels_last) if are_images else value


def _moves_only_tensors(batch: Any) -> bool:
    moving: list[bool] = []

    def note(value: Any) -> Any:
        moving.append(moves_itself(value))
        return value

    mapped(batch, note)
    return not any(moving)
