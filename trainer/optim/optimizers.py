"""Which optimizers are supported."""

import inspect

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from trainer.errors import UserError
from trainer.optim.combined import parts_of


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or a subclass whose step() needs no closure: docs/faq.md has one of LBFGS, with "
            "max_iter=1"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def check_gradients(optimizer: Optimizer) -> None:
    """Raise UserError if `SparseAdam` has got the gradient of a parameter that is not sparse."""
    for part, group in zip(parts_of(optimizer), optimizer.param_groups, strict=True):
        dense = [p for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        if isinstance(part, SparseAdam) and dense:
            raise UserError(
                f"optim: SparseAdam updates parameters with sparse gradients, but {len(dense)} of "
                f"{len(group['params'])} have dense ones; give it only weights of nn.Embedding(sparse=True), "
                "by optim.groups: [{match: embedding, optimizer: {_target_: torch.optim.SparseAdam}}]"
            )
