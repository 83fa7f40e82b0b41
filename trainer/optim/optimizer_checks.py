"""Which optimizers are supported."""

import inspect

from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer

from trainer.errors import UserError


def check_optimizer(optimizer: Optimizer, is_sharded: bool = False) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step.

    Or, if `is_sharded`, for the one of torch's that needs whole tensors and gets rows; Muon gathers them.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or any optimizer whose step() needs no closure"
        )
    if is_sharded and isinstance(optimizer, Adafactor):
        raise UserError(
            f"optim: {name} updates a row of a tensor by sums over its other rows, but under strategy=fsdp a "
            "rank's optimizer has its own rows alone; use strategy=ddp, or optim=adamw"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
