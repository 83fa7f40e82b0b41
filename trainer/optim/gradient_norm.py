"""The norm of all gradients, of whole tensors or of shards."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> Tensor:
    """The norm, a scalar.

    Args:
        group: the ranks that hold the rows of these shards together (then a collective); None: whole tensors.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or group is None:
        return nn.utils.get_total_norm(gradients)
    squares = torch.stack(torch._foreach_norm(gradients)) ** 2
    dist.all_reduce(squares, group=group)
    return torch.linalg.vector_norm(squares**0.5)
