"""Save and restore plain attributes that an optimizer changes."""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import first_few
from trainer.optim.whole_tensors import updater
from trainer.tensors.bits import as_bytes
from trainer.tensors.nested import leaves, mapped

log = logging.getLogger(__name__)
_TORCH_NAMES = {"state", "param_groups", "defaults"}
_TORCH_NAMES |= {"_opt_called", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"}
_MAX_ELEMENTS = 10_000  # in a container or a tensor


class OptimizerAttributes:
    """Saves and restores the plain attributes of a new optimizer and of the optimizers that it contains.

    torch saves only `state` and `param_groups`, but an optimizer may keep a flag, a counter or an estimate in
    another attribute. An attribute whose initial value differs from that in the saved run is not restored,
    because a setting that determines it has changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = {name: copy.deepcopy(value) for name, value in self._values()}

    def state_dict(self) -> dict[str, Any]:
        """Return [initial value, copy of the value, whether it is on the CPU] for each changed attribute."""
        return {
            name: [first, copy.deepcopy(value), _is_on_cpu(value)]
            for name, value in self._values()
            if _bits(value) != _bits(first := self._first.get(name))
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore attributes that had the same initial value in the saved run; warn about the others."""
        by_path = {path: optimizer for optimizer, path in optimizers_in(self._optimizer).items()}
        device, others = self._optimizer.param_groups[0]["params"][0].device, []
        for name, (first, value, on_cpu) in saved.items():
            path, _, attribute = name.rpartition(".")
            if path not in by_path or _bits(first) != _bits(self._first.get(name)):
                others.append(name)
                continue
            if not on_cpu:
                value = mapped(value, lambda v: v.to(device) if isinstance(v, Tensor) else v)
            setattr(by_path[path], attribute, value)
        if others:
            log.warning(
                "the saved value of %s is not restored, because the attribute no longer exists, or its "
                "initial value has changed",
                first_few(others),
            )

    def _values(self) -> Iterator[tuple[str, Any]]:
        for optimizer, path in optimizers_in(self._optimizer).items():
            for name, value in own_attributes(optimizer).items():
                if is_plain(value):
                    yield f"{path}.{name}", value


def optimizers_in(optimizer: Optimizer) -> dict[Optimizer, str]:
    """Return `optimizer` and all optimizers in its attributes, lists and dicts included, with their paths."""
    queue = [updater(optimizer)]
    found = {queue[0]: "optimizer"}
    for owner in queue:  # the loop extends it
        for name, value in own_attributes(owner).items():
            for number, part in enumerate(leaves(value)):
                if isinstance(part, Optimizer) and (part := updater(part)) not in found:
                    found[part] = f"{found[owner]}.{name}.{number}"
                    queue.append(part)
    return found


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of `optimizer` without those that every torch optimizer has."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _TORCH_NAMES and not name.startswith("_optimizer_")
    }


def is_plain(value: Any) -> bool:
    """Return whether `value` can be saved: numbers, text, small tensors, and containers of these."""
    if type(value) in (list, tuple, dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return len(value) <= _MAX_ELEMENTS and all(map(is_plain, parts))
    if type(value) is Tensor:
        is_dense = value.layout == torch.strided and not value.is_meta
        return is_dense and not value.requires_grad and value.numel() <= _MAX_ELEMENTS
    return value is None or type(value) in (bool, int, float, str)


def _bits(value: Any) -> str:
    """Return a string that identifies a plain value bit by bit, so that NaN equals itself."""
    return repr(
        mapped(value, lambda v: (v.dtype, v.shape, bytes(as_bytes(v.cpu()))) if isinstance(v, Tensor) else v)
    )


def _is_on_cpu(value: Any) -> bool:
    return all(part.device.type == "cpu" for part in leaves(value) if isinstance(part, Tensor))
