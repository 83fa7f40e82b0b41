"""Which optimizers are supported; several as one."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from trainer.errors import UserError
from trainer.optim.whole_tensors import updater


class CombinedOptimizer(Optimizer):
    """Has the parameter groups and the state of all `parts`, which share them: to others it is one optimizer.

    Args:
        parts: with different parameters, new: without state.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for part in self.parts:
            part.step()
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's load_state_dict ends with it
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            own = [next(groups) for _ in part.param_groups]
            part.__setstate__({"state": self.state, "param_groups": own})


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The user's optimizer of each parameter group."""
    if isinstance(optimizer, CombinedOptimizer):
        return [own for part in optimizer.parts for own in parts_of(part)]
    return [updater(optimizer) for _ in optimizer.param_groups]


def has_user_part(optimizer: Optimizer) -> bool:
    """Whether a part is neither torch's nor this project's."""
    packages = {type(part).__module__.partition(".")[0] for part in parts_of(optimizer)}
    return not packages <= {"torch", "trainer"}


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
