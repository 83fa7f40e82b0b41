"""Checks for optimizers that are not supported."""

import inspect

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from trainer.errors import UserError
from trainer.optim.combined import parts_of


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer that would fail at its first step."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim: expected a torch.optim.Optimizer, got a {name}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} is not supported, because its step() needs a closure to compute the loss several "
            "times; use optim=adamw, or a subclass whose step() needs no closure (docs/faq.md has one of "
            "LBFGS, with max_iter=1)"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that get sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def check_gradients(optimizer: Optimizer) -> None:
    """Raise UserError if a parameter of `SparseAdam` has a dense gradient."""
    for part, group in zip(parts_of(optimizer), optimizer.param_groups, strict=True):
        dense = [p for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        if isinstance(part, SparseAdam) and dense:
            raise UserError(
                f"optim: SparseAdam needs sparse gradients, but those of {len(dense)} of its "
                f"{len(group['params'])} parameters are dense; use it only for weights of "
                "nn.Embedding(sparse=True), by "
                "optim.groups: [{match: embedding, optimizer: {_target_: torch.optim.SparseAdam}}]"
            )
