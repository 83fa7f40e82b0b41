"""The norm of all gradients, and scaling gradients to a maximum norm, for shards and whole tensors.

torch's own functions take a time quadratic in the number of DTensors: two minutes for 10,000. Here they get
each rank's shards; the results equal torch's, to the bit.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.local_shard import is_dtensor, to_local


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm, a scalar (a collective over the ranks of sharded gradients, if any)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or not is_dtensor(gradients[0]):
        return nn.utils.get_total_norm(gradients)
    mesh = gradients[0].device_mesh
    squares = torch.stack(torch._foreach_norm([to_local(gradient) for gradient in gradients])) ** 2
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return torch.linalg.vector_norm(squares**0.5)


@torch.no_grad()
def scale_down(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, if it is larger."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(is_dtensor(parameter.grad) for parameter in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    shards = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1).to(shards[0].device))
