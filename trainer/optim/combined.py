"""An optimizer that combines several optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer.optim.whole_tensors import updater


class CombinedOptimizer(Optimizer):
    """Combines `parts`, new optimizers for different parameters, with shared groups and state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for part in self.parts:
            part.step()
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:  # called at the end of torch's load_state_dict
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            own = [next(groups) for _ in part.param_groups]
            part.__setstate__({"state": self.state, "param_groups": own})


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return, for each parameter group, the optimizer that updates it."""
    if isinstance(optimizer, CombinedOptimizer):
        return [own for part in optimizer.parts for own in parts_of(part)]
    return [updater(optimizer) for _ in optimizer.param_groups]


def has_user_part(optimizer: Optimizer) -> bool:
    """Return whether a part is of a class outside torch and this project."""
    packages = {type(part).__module__.partition(".")[0] for part in parts_of(optimizer)}
    return not packages <= {"torch", "trainer"}
