"""One model over several devices of its process: units in order; hooks move inputs to the next device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.config import SplitConfig
from trainer.errors import UserError, first_line
from trainer.nested import leaves, mapped

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def devices_of_replica(settings: SplitConfig, first: torch.device) -> list[torch.device]:
    """The devices over which a replica is split, from the `first` of this process on; [] if it is whole.

    Raises:
        UserError: this process has fewer devices, or a name is invalid.
    """
    count, names = settings.devices_per_replica, settings.devices
    if names is not None:
        try:
            return [torch.device(name) for name in names]
        except RuntimeError as error:
            raise UserError(f"strategy.devices={names}: {first_line(error)}") from error
    if count == 1:
        return []
    if first.type == "cpu":
        raise UserError(
            f"strategy.devices_per_replica={count}, but this process has one device, the CPU; "
            f"strategy.devices=[{','.join(['cpu'] * count)}] uses it {count} times, to try it out"
        )
    assert first.index is not None
    return [torch.device(first.type, first.index + number) for number in range(count)]


class Split:
    """Places `model` on `devices`, in which a device may be repeated.

    Each unit is whole on one device; units are assigned in order, so that every device has about as many
    bytes of parameters. Units are those of the model's `fsdp_units`; without any, the modules that containers
    (Sequential and the like, the model, and modules larger than a device's share) call one after another. All
    other modules are on the device of the unit before them, and modules that share a weight are together.

    Attributes:
        moves: tensors moved from one stage to another, so far; also counted if both are the same device.
        passes: forward passes of the whole model so far.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.moves = self.passes = 0
        self._at = 0  # the index of the computing stage
        stages = stages_of(model, len(devices))
        self.num_bytes = [0] * len(devices)  # of parameters and buffers, by stage
        seen: set[Tensor] = set()
        for module, stage in stages.items():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            self.num_bytes[stage] += sum(tensor.nbytes for tensor in own if tensor not in seen)
            seen.update(own)
            for tensor in own:
                tensor.data = tensor.data.to(devices[stage])
        for module in _outermost(model, stages):
            stage = stages[module]
            module.register_forward_pre_hook(partial(self._enter, stage, devices[stage]), with_kwargs=True)
        model.forward = partial(self._forward, model.forward, devices[0])

    def _forward(self, forward: Callable[..., Any], first: torch.device, *args: Any, **kwargs: Any) -> Any:
        self._at = 0
        self.passes += 1
        with _Together(self):
            output = forward(*args, **kwargs)
        # Targets are on the device of the inputs.
        return self._moved(output, first, self._at != 0)

    def _enter(self, stage: int, device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
        elsewhere, self._at = stage != self._at, stage
        return self._moved(args, device, elsewhere), self._moved(kwargs, device, elsewhere)

    def _moved(self, value: Any, device: torch.device, elsewhere: bool) -> Any:
        """`value`, tensors in tuples, lists and dicts, on `device`."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            self.moves += elsewhere or value.device != device
            # The host would read a value before it has arrived.
            return value.to(device, non_blocking=device.type != "cpu")

        return mapped(value, move)


class _Together(TorchFunctionMode):
    """Moves tensors to one device if code between units uses several.

    The device is that of a tensor that is written into or indexed, else of a parameter, else of the last
    tensor. So a head that is tied to the embedding computes on the embedding's device.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (args, kwargs or {})
        tensors = [value for value in leaves(call) if isinstance(value, Tensor) and value.ndim]
        if len({tensor.device for tensor in tensors}) > 1:
            parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
            chosen = tensors[0] if _is_about_first(func) else (parameters or tensors)[-1]

            def move(value: Any) -> Any:
                if not (isinstance(value, Tensor) and value.ndim) or value.device == chosen.device:
                    return value
                self._split.moves += 1
                return value.to(chosen.device)

            call = mapped(call, move)
        return func(*call[0], **call[1])


def _is_about_first(func: Any) -> bool:
    """Whether `func` changes its first tensor, which then must not be a copy, or indexes it."""
    name = getattr(func, "__name__", "")
    changes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return changes or name in ("__setitem__", "__getitem__")


def stages_of(model: nn.Module, count: int) -> dict[nn.Module, int]:
    """The stage of every module, for its own parameters and buffers."""
    order = {module: number for number, module in enumerate(model.modules())}
    units = sorted(getattr(model, "fsdp_units", None) or _units_by_size(model, count), key=order.__getitem__)
    if len(units) < count:
        raise UserError(
            f"strategy.devices_per_replica={count}, but {type(model).__name__} has {len(units)} units to "
            "place (its fsdp_units, or the modules that it calls one after another); use "
            f"{max(1, len(units))}, or list more"
        )
    total, before = sum(_bytes(unit) for unit in units), 0
    chosen: dict[nn.Module, int] = {}
    for number, unit in enumerate(units):
        middle = before + _bytes(unit) / 2
        stage = min(count - 1, int(middle * count / max(1, total)))
        # Every stage gets a unit, for any size of the first and last.
        stage = max(min(stage, number), count - (len(units) - number))
        chosen[unit] = stage
        before += _bytes(unit)
    stages: dict[nn.Module, int] = {}
    owners: dict[Tensor, int] = {}

    def walk(module: nn.Module, stage: int) -> int:
        """Assign a stage to `module` and all in it, from `stage` on; return that of its last unit."""
        if module in stages:
            return stage
        stage = chosen.get(module, stage)
        if not _holds_units(module, chosen):  # whole in one stage, with modules that share its weights
            stage_here = next((owners[p] for p in module.parameters() if p in owners), stage)
            for part in module.modules():
                stages.setdefault(part, stage_here)
            owners.update(dict.fromkeys(module.parameters(), stage_here))
            return stage
        stages[module] = next((owners[p] for p in module.parameters(recurse=False) if p in owners), stage)
        owners.update(dict.fromkeys(module.parameters(recurse=False), stages[module]))
        for child in module.children():
            stage = walk(child, stage)
        return stage

    walk(model, 0)
    return stages


def _holds_units(module: nn.Module, units: dict[nn.Module, int]) -> bool:
    """Whether `module` contains other units."""
    return module not in units and any(part in units for part in module.modules())


def _outermost(model: nn.Module, stages: dict[nn.Module, int]) -> Iterator[nn.Module]:
    """Modules with parameters that are whole in one stage, and whose parent is not, or is the model."""
    for child in model.children():
        parts = [part for part in child.modules() if any(True for _ in part.parameters(recurse=False))]
        if len({stages[part] for part in parts}) == 1 and not isinstance(
            child, nn.ModuleList | nn.ModuleDict
        ):
            yield child
        elif parts:
            yield from _outermost(child, stages)


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
