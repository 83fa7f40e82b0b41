"""Several optimizers as one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

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
