"""Which optimizers are supported, and several of them as one: each updates its own parameter groups."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer

from trainer.errors import UserError


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
    """The optimizer that updates each parameter group."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return [part for part in parts for _ in part.param_groups]


def has_user_part(optimizer: Optimizer) -> bool:
    """Whether a part is neither torch's nor this project's."""
    packages = {type(part).__module__.partition(".")[0] for part in parts_of(optimizer)}
    return not packages <= {"torch", "trainer"}


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
