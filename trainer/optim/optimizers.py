"""Checks for optimizers and for parameters with sparse gradients."""

import inspect

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import UserError


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError if the object is not an optimizer, or its step() needs a closure."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim: expected a torch.optim.Optimizer, got a {name}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} is not supported, because its step() needs a closure to compute the loss several "
            "times; use optim=adamw, or a subclass whose step() needs no closure (docs/faq.md shows one "
            "for LBFGS, with max_iter=1)"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that get sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
