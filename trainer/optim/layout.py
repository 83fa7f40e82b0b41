"""Layouts in memory: torch's fused steps take a parameter, its gradient and its state to be laid out alike.

On a GPU torch refuses others. On a CPU it silently adds other numbers of a gradient to those of a parameter.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def is_dense(parameter: Tensor) -> bool:
    """Whether it is laid out row by row, or as images with the channels last: autograd's gradients follow."""
    as_images = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return as_images or parameter.is_contiguous()


def laid_out_as(parameter: Any, value: Any) -> Any:
    """`value`, of the optimizer's state of `parameter`, laid out alike if it is a tensor of its shape."""
    alike = isinstance(parameter, Tensor) and isinstance(value, Tensor) and value.shape == parameter.shape
    if not alike or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def lay_out_gradients(optimizer: Optimizer, arguments: Any, options: Any) -> None:
    """A hook before each fused step, for gradients that user code has set in place of autograd's."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = laid_out_as(parameter, gradient)
