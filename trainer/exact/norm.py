"""The norm of all gradients, whose bits do not depend on how parameters are sharded."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.exact.digits import from_digits, to_digits
from trainer.model.trainable_parameters import TrainableParameters
from trainer.tensors.local_shard import num_rows


@torch.no_grad()
def exact_norm(trainable: TrainableParameters) -> Tensor:
    """Return the norm of all gradients, a scalar (a collective if parameters are sharded)."""
    gradients = [own.grad for own in trainable.own.values() if own.grad is not None]
    if not gradients:
        return torch.zeros(())
    sums = to_digits(torch.cat([_row_squares(gradient).to(gradients[0].device) for gradient in gradients]))
    if trainable.group is not None:
        dist.all_reduce(sums, group=trainable.group)
    return from_digits(sums).sqrt().float()


def _row_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of each row.

    It is computed by elementwise additions, because the order of a reduction would depend on the shape.
    """
    if not gradient.numel():
        return gradient.new_zeros(0, dtype=torch.float32)
    rows = gradient.float().square().reshape(num_rows(gradient.shape), -1)
    length = rows.shape[1]
    while length > 1:
        half = (length + 1) // 2
        rows[:, : length - half] += rows[:, half:length]
        length = half
    return rows[:, 0]
