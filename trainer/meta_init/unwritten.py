"""Marks memory that was never written to, so that results computed from it can be recognized."""

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The mark of unwritten memory: a NaN, so that results from it are this NaN, and no other NaN.
_UNWRITTEN = {2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FF9A5A5A5A5A5A5}


def mark_unwritten(tensor: Tensor) -> None:
    size = tensor.element_size()
    if tensor.is_complex():
        mark_unwritten(torch.view_as_real(tensor))
    elif tensor.is_floating_point() and size in _BITS:
        tensor.view(_BITS[size]).fill_(_UNWRITTEN[size])
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


def is_unwritten(tensor: Tensor, is_parameter: bool) -> Tensor | None:
    """By element; None if the values cannot tell.

    A parameter must not start as any NaN: after a conversion the mark is lost, but the NaN stays.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if is_parameter:
        return tensor.isnan() if tensor.element_size() > 1 else tensor.float().isnan()
    size = tensor.element_size()
    return tensor.view(_BITS[size]) == _UNWRITTEN[size] if size in _BITS and not tensor.is_complex() else None
