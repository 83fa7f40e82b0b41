"""Numbers that a user's optimizer reads from sharded tensors."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trainer.optim.several import has_user_part

_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, torch.is_nonzero, Tensor.__contains__),
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__),
}


def whole_scalars(optimizer: Optimizer, reads: bool = True) -> AbstractContextManager[Any]:
    """The context of a step of `optimizer`, in which a number read from a sharded tensor is the whole one's.

    torch reads this rank's part: `float(gradient.norm())` is the norm of its own rows, and ranks would make
    different updates. Its own optimizers read none, and are spared a call in Python for each operation.

    Args:
        reads: whether ranks make their steps together, since reading is then a collective.
    """
    return _ReadsWhole() if reads and has_user_part(optimizer) else nullcontext()


class _ReadsWhole(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(), *args[1:])
        return func(*args, **(kwargs or {}))
