"""One model over several devices of its process: units in order, inputs moved to the next device by hooks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.errors import UserError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Split:
    """Places `model` on `devices`, of which one may stand there several times.

    Each unit lies whole on one device; they are given out in order, so that every device has about as many
    bytes of parameters. Units are those of the model's `fsdp_units`; without any, the modules that containers
    (Sequential and its like, the model, and what is larger than a device's share) call one after another. All
    other modules lie where the unit before them does, and those that share a weight lie together.

    Attributes:
        moves: tensors that were handed on from one place to another, so far; also where both are one device.
        passes: forward passes of the whole model so far.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.moves = self.passes = 0
        self._at = 0  # the place that computes, of the devices' places in their order
        places = _places(model, len(devices))
        self.num_bytes = [0] * len(devices)  # of parameters and buffers, by place
        seen: set[Tensor] = set()
        for module, place in places.items():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            self.num_bytes[place] += sum(tensor.nbytes for tensor in own if tensor not in seen)
            seen.update(own)
            for tensor in own:
                tensor.data = tensor.data.to(devices[place])
        for module in _outermost(model, places):
            place = places[module]
            module.register_forward_pre_hook(partial(self._enter, place, devices[place]), with_kwargs=True)
        model.forward = partial(self._forward, model.forward, devices[0])

    def _forward(self, forward: Callable[..., Any], first: torch.device, *args: Any, **kwargs: Any) -> Any:
        self._at = 0
        self.passes += 1
        with _Together(self):
            output = forward(*args, **kwargs)
        # Targets lie where inputs came from.
        return self._moved(output, first, self._at != 0)

    def _enter(self, place: int, device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
        elsewhere, self._at = place != self._at, place
        return self._moved(args, device, elsewhere), self._moved(kwargs, device, elsewhere)

    def _moved(self, value: Any, device: torch.device, elsewhere: bool) -> Any:
        """`value`, tensors in tuples, lists and dicts, on `device`."""
        if isinstance(value, Tensor):
            self.moves += elsewhere or value.device != device
            return value.to(device, non_blocking=True)
        if isinstance(value, dict):
            return type(value)({key: self._moved(item, device, elsewhere) for key, item in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._moved(item, device, elsewhere) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self._moved(item, device, elsewhere) for item in value)
        return value


class _Together(TorchFunctionMode):
    """Where code between units uses tensors of several devices, moves them to that of a parameter among them.

    So a head that is tied to the embedding computes where the embedding lies; without a parameter, tensors
    move to the last one.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor) and value.ndim]
        if len({value.device for value in tensors}) > 1:
            parameters = [value for value in tensors if isinstance(value, nn.Parameter)]
            device = (parameters or tensors)[-1].device
            self._split.moves += sum(value.device != device for value in tensors)
            args = tuple(
                value.to(device) if isinstance(value, Tensor) and value.ndim else value for value in args
            )
        return func(*args, **(kwargs or {}))


def _places(model: nn.Module, count: int) -> dict[nn.Module, int]:
    """The place of every module, for the parameters and buffers that are its own."""
    order = {module: number for number, module in enumerate(model.modules())}
    units = sorted(getattr(model, "fsdp_units", None) or _units_by_size(model, count), key=order.__getitem__)
    if len(units) < count:
        raise UserError(
            f"strategy.devices_per_replica={count}, but {type(model).__name__} has {len(units)} units to "
            "give out (its fsdp_units, or what it calls one after another); take "
            f"{max(1, len(units))}, or name more"
        )
    total, before = sum(_bytes(unit) for unit in units), 0
    chosen: dict[nn.Module, int] = {}
    for number, unit in enumerate(units):
        middle = before + _bytes(unit) / 2
        place = min(count - 1, int(middle * count / max(1, total)))
        # No place is left out, however large the first or the last unit.
        place = max(min(place, number), count - (len(units) - number))
        chosen[unit] = place
        before += _bytes(unit)
    places: dict[nn.Module, int] = {}
    owners: dict[Tensor, int] = {}

    def walk(module: nn.Module, place: int) -> int:
        """Give `module` and all in it a place, from `place` on; return that of the last unit in it."""
        if module in places:
            return place
        place = chosen.get(module, place)
        if not _holds_units(module, chosen):  # whole in one place, with what it shares weights with
            place_here = next((owners[p] for p in module.parameters() if p in owners), place)
            for part in module.modules():
                places.setdefault(part, place_here)
            owners.update(dict.fromkeys(module.parameters(), place_here))
            return place
        places[module] = next((owners[p] for p in module.parameters(recurse=False) if p in owners), place)
        owners.update(dict.fromkeys(module.parameters(recurse=False), places[module]))
        for child in module.children():
            place = walk(child, place)
        return place

    walk(model, 0)
    return places


def _holds_units(module: nn.Module, units: dict[nn.Module, int]) -> bool:
    """Whether there are units in `module` besides itself."""
    return module not in units and any(part in units for part in module.modules())


def _outermost(model: nn.Module, places: dict[nn.Module, int]) -> Iterator[nn.Module]:
    """Modules with parameters that lie whole in one place, and whose parent does not, or is the model."""
    for child in model.children():
        parts = [part for part in child.modules() if any(True for _ in part.parameters(recurse=False))]
        if len({places[part] for part in parts}) == 1 and not isinstance(
            child, nn.ModuleList | nn.ModuleDict
        ):
            yield child
        elif parts:
            yield from _outermost(child, places)


def _units_by_size(module: nn.Module, count: int, share: float | None = None) -> Iterator[nn.Module]:
    share = _bytes(module) / count if share is None else share
    for child in module.children():
        own = _bytes(child)
        inner = [part for part in child.children() if _bytes(part)]
        if isinstance(child, _CONTAINERS) or (own > share and inner):
            yield from _units_by_size(child, count, share)
        elif own:
            yield child


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
