"""The norm of all gradients with the same bits, however rows of parameters are shared among ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.local_shard import is_dtensor, num_rows, own_rows, to_local


@torch.no_grad()
def exact_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm, a scalar (a collective if parameters are sharded).

    Only elementwise operations add: a reduction's order would depend on the shape.
    """
    held = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    if not held:
        return torch.zeros(())
    total, device = sum(num_rows(parameter.shape) for parameter, _ in held), to_local(held[0][1]).device
    sums = torch.zeros(total, device=device)
    begin = 0
    for parameter, gradient in held:
        local, (first, end) = to_local(gradient), own_rows(gradient)
        if local.numel():
            squares = local.float().square().reshape(end - first, -1)
            sums[begin + first : begin + end] = _folded(squares)
        begin += num_rows(parameter.shape)
    if is_dtensor(held[0][1]):
        dist.all_reduce(sums, group=held[0][1].device_mesh.get_group())  # in each place one number, and zeros
    return _folded(sums[None])[0].sqrt()


def _folded(rows: Tensor) -> Tensor:
    """The sum of each row, overwriting `rows`."""
    length = rows.shape[1]
    while length > 1:
        half = (length + 1) // 2
        rows[:, : length - half] += rows[:, half:length]
        length = half
    return rows[:, 0]
