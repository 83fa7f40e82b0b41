"""The norm of all gradients with the same bits, however rows of parameters are shared among ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.exact.digits import from_digits, to_digits
from trainer.local_shard import is_dtensor, num_rows, to_local


@torch.no_grad()
def exact_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, a scalar (a collective if parameters are sharded)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    device = to_local(gradients[0]).device
    squares = [_of_rows(to_local(gradient)).to(device) for gradient in gradients]
    sums = to_digits(torch.cat(squares))
    if is_dtensor(gradients[0]):
        dist.all_reduce(sums, group=gradients[0].device_mesh.get_group())
    return from_digits(sums).sqrt().float()


def _of_rows(gradient: Tensor) -> Tensor:
    """The sum of squares of each row, added elementwise: a reduction's order would depend on the shape."""
    if not gradient.numel():
        return gradient.new_zeros(0, dtype=torch.float32)
    rows = gradient.float().square().reshape(num_rows(gradient.shape), -1)
    length = rows.shape[1]
    while length > 1:
        half = (length + 1) // 2
        rows[:, : length - half] += rows[:, half:length]
        length = half
    return rows[:, 0]
