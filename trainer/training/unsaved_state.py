"""Attributes that modules, tasks and optimizers keep without saving them, so that a resume is not exact."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.fingerprint import OF_EVERY_MODULE, class_data, fingerprint

log = logging.getLogger(__name__)
_OF_EVERY_OPTIMIZER = {"state", "param_groups", "defaults"}


class UnsavedState:
    """Compares the attributes of modules, task and optimizer after the first two steps, and at each save.

    Warns of what changed. An attribute that the first step sets and the second does not change, such as a
    cache, is not state. At a save, what is new or of another size does not count either. A module with
    `get_extra_state`, and an optimizer with its own `state_dict`, decide themselves what is saved.

    Args:
        model: unwrapped.
        looks: whether this rank compares; one is enough, the first of those that train.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, looks: bool) -> None:
        self._model, self._task, self._optimizer, self._looks = model, task, optimizer, looks
        self._num_steps = 0
        self._before: dict[str, dict[str, Any]] = {}  # fingerprints, of step 1 or 2
        self._warned: set[str] = set()

    def look(self) -> None:
        """Called after each step."""
        self._num_steps += 1
        if not self._looks or self._num_steps > 2:
            return
        now = self._attributes()
        if self._num_steps == 2:
            self._warn_once(name for name in now if now[name] != self._before.get(name, now[name]))
        self._before = now

    def look_at_save(self) -> None:
        """Called before each save, for what changes only later."""
        if self._looks and self._num_steps > 2:
            self._warn_once(
                name
                for name, values in self._attributes().items()
                if any(
                    _changed(self._before.get(name, {}).get(place), value) for place, value in values.items()
                )
            )

    def _warn_once(self, names: Iterable[str]) -> None:
        changed = [name for name in names if name not in self._warned]
        self._warned.update(changed)
        if changed:
            log.warning(
                "%s%s changes from step to step, and no checkpoint holds it: if a step depends on the value "
                "that the one before left, a resumed run will differ; make it a buffer of the model "
                "(register_buffer), or give its module get_extra_state and set_extra_state; what an "
                "optimizer keeps belongs in its state",
                ", ".join(changed[:5]),
                f" (and {len(changed) - 5} more)" * (len(changed) > 5),
            )

    def _attributes(self) -> dict[str, dict[str, Any]]:
        """The fingerprint of each attribute, by name, without the model's parameters, buffers and modules."""
        model = self._model
        known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
        found: dict[str, Any] = {}
        for prefix, module in model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                for name, value in (class_data(type(module)) | vars(module)).items():
                    if name not in OF_EVERY_MODULE:
                        found[f"{prefix}.{name}" if prefix else name] = value
        # A task may be a module, but no checkpoint holds its buffers and modules.
        parts = {**getattr(self._task, "_buffers", {}), **getattr(self._task, "_modules", {})}
        for name, value in (class_data(type(self._task)) | vars(self._task) | parts).items():
            if name not in {*OF_EVERY_MODULE, "plain_loss"}:  # `Task.loss` sets it for the log
                found[f"task.{name}"] = value
        if type(self._optimizer).state_dict is Optimizer.state_dict:
            for name, value in (class_data(type(self._optimizer)) | vars(self._optimizer)).items():
                if name not in _OF_EVERY_OPTIMIZER and not name.startswith("_optimizer_"):
                    found[f"optimizer.{name}"] = value
        return {name: fingerprint(value, known) for name, value in found.items()}


def _changed(before: Any, now: Any) -> bool:
    """Whether a value is another one of the same size: a cache that grew is not state."""
    if before is None or now is None or before == now:
        return False
    return not (isinstance(before, tuple) and isinstance(now, tuple) and before[0] != now[0])
