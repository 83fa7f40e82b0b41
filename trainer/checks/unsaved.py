"""What modules, tasks and optimizers keep in attributes without saving it, so that a resume is not exact."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.errors import first_few
from trainer.fingerprint import OF_EVERY_MODULE, fingerprint, is_other_value
from trainer.nested import leaves
from trainer.optim.combined import parts_of

log = logging.getLogger(__name__)
_OF_EVERY_OPTIMIZER = {"state", "param_groups", "defaults"}


class UnsavedState:
    """Compares the attributes of modules, task and optimizer after pairs of steps, and at each save.

    Warns of what changed. A pair is 1 and 2, 3 and 4, 7 and 8, 15 and 16, and so on, since state may begin
    late. What is new in a pair's first step or at a save, or of another size there, does not count, so that
    a cache is not state. A module with `get_extra_state`, and an optimizer with its own `state_dict`, decide
    themselves what is saved; not one of several, which are saved as one.

    Args:
        model: unwrapped.
        looks: whether this rank compares; one is enough, the first of those that train.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, looks: bool) -> None:
        self._model, self._task, self._optimizer, self._looks = model, task, optimizer, looks
        self._num_steps = 0
        self._before: dict[str, dict[str, Any]] = {}  # fingerprints of the last step of a pair
        self._warned: set[str] = set()
        self._left_out = {*OF_EVERY_MODULE, "plain_loss"}  # `Task.loss` sets the latter for the log

    def leave_out(self, names: Iterable[str]) -> None:
        """Attributes of the task that each step sets again."""
        self._left_out.update(names)

    def look(self) -> None:
        """Called after each step."""
        if not self._looks:
            return
        self._num_steps += 1
        is_second = self._num_steps.bit_count() == 1
        if is_second or (self._num_steps + 1).bit_count() == 1:
            self._before = self._compare(is_second)

    def look_at_save(self) -> None:
        """Called before each save."""
        if self._looks and self._num_steps > 2:
            self._compare(by_one_step=False)

    def _compare(self, by_one_step: bool) -> dict[str, dict[str, Any]]:
        found = dict(self._attributes())
        self._warn_once(name for name, now in found.items() if self._is_changed(name, now, by_one_step))
        return found

    def _is_changed(self, name: str, now: dict[str, Any], by_one_step: bool) -> bool:
        before = self._before.get(name, now)
        if by_one_step:
            return before != now
        return any(is_other_value(before.get(place), value) for place, value in now.items())

    def _warn_once(self, names: Iterable[str]) -> None:
        changed = [name for name in names if name not in self._warned]
        self._warned.update(changed)
        if changed:
            log.warning(
                "%s changes from step to step, and no checkpoint holds it: if a step depends on the value "
                "that the one before left, a resumed run will differ; make it a buffer of the model "
                "(register_buffer), or give its module get_extra_state and set_extra_state; what an "
                "optimizer keeps belongs in its state",
                first_few(changed),
            )

    def _attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The fingerprint of each attribute, by name, without the model's parameters, buffers and modules."""
        model, task = self._model, self._task
        known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
        for prefix, module in model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                for name, value in vars(module).items():
                    if name not in OF_EVERY_MODULE:
                        yield f"{prefix}.{name}" if prefix else name, fingerprint(value, known)
        # A task may be a module, but no checkpoint holds its buffers and modules.
        parts = {**getattr(task, "_buffers", {}), **getattr(task, "_modules", {})}
        for name, value in (vars(task) | parts).items():
            if name not in self._left_out:
                yield f"task.{name}", fingerprint(value, known)
        optimizers = {id(part): part for part in parts_of(self._optimizer)}.values()
        if len(optimizers) == 1 and type(self._optimizer).state_dict is not Optimizer.state_dict:
            return
        known |= {id(self._optimizer), *map(id, optimizers)}  # torch binds methods to them
        for part in optimizers:
            held = {name: v for name, v in vars(part).items() if name not in _OF_EVERY_OPTIMIZER}
            known |= {id(v) for v in leaves(held) if isinstance(v, Optimizer)}  # they share its state
            for name, value in held.items():
                if not name.startswith("_optimizer_"):
                    yield f"optimizer.{name}", fingerprint(value, known)
