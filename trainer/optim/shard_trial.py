"""Find out, by a trial on small tensors, whether an optimizer can update shards or needs whole tensors."""

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import accelerator
from trainer.errors import UserError, class_and_line
from trainer.optim.whole_tensors import update_only
from trainer.tensors.generators import generators_kept
from trainer.tensors.local_shard import inner_tensors, rows_of_shard
from trainer.tensors.nested import leaves
from trainer.torch_private import TorchDispatchMode

Make = Callable[[list[dict[str, Any]]], Optimizer]
"""A function that builds an optimizer, with all its options, from parameter groups."""

_STEPS = 5
_ROWS, _COLUMNS = 64, ((), (72,), (24, 3), (8, 3, 3))  # 4,608 elements: 8-bit optimizers need 4,096
_LR = 0.1  # instead of the real rate: if that is small, updates are lost in rounding
_RELATIVE, _ABSOLUTE = 1e-3, 5e-6  # fused kernels round the last elements of a tensor differently


class Way(IntEnum):
    """Which tensors an optimizer needs for correct updates; if ranks differ, the larger value holds."""

    SHARDS = 0
    WHOLE = 1
    NEITHER = 2


Rows = tuple[int, int]
"""The first row, and the row after the last."""


@dataclass
class _Outcome:
    """The result of one optimizer of a trial; updates and states are keyed by tensor number."""

    updates: dict[int, Tensor]
    states: dict[int, Any]
    of_no_parameter: dict[Any, Any]
    options: list[dict[str, Any]]


def needs_whole_tensors(name: str, make: Make, groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether an optimizer updates a tensor differently in shards than as a whole (a collective).

    Small tensors with as many dimensions as the real ones are updated for a few steps in three ways: whole,
    by one optimizer; cut by rows, with one optimizer per rank; and whole, divided among three optimizers. The
    updates, the state and the group options must be equal. A checkpoint must be able to store the state: each
    tensor in it has the shape of its parameter, or is the same for all parts.

    Args:
        name: the name of the class, for messages.
        groups: parameter groups with the real parameters.

    Raises:
        UserError: on every rank, if updates are correct in neither way, or the trial fails.
    """
    everyones: list[Any] = [None] * dist.get_world_size()

    def find() -> None:
        accelerator.use(groups[0]["params"][0].device)  # of this thread
        with generators_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = way_of(name, ShardTrial(make, groups))
        dist.all_gather_object(everyones, mine)

    with ThreadPoolExecutor(1) as thread:  # in which no mode of the caller is active, such as fake tensors
        thread.submit(find).result()
    way, why = max(everyones)
    if way is Way.NEITHER:
        raise UserError(f"optim: {why}; under strategy=fsdp use optim=adamw, or use strategy=ddp")
    return bool(way)


def way_of(name: str, trial: "ShardTrial") -> tuple[Way, str]:
    """Return the first way with correct updates, and the reason if there is none."""
    try:
        right = trial.train([trial.all_rows])
    except Exception as error:  # the user's code may raise anything
        return Way.NEITHER, f"a trial of {name} on small tensors failed with {class_and_line(error)}"
    try:
        if all(trial.is_right(trial.train(trial.cut(parts)), right) for parts in (2, 3)):
            return Way.SHARDS, ""
    except Exception:  # such as the maximum of a shard without rows
        pass
    why = f"{name} computes the update of a parameter from other parameters too, which are on other ranks"
    try:
        if trial.is_right(trial.train(trial.shared(3), apart=True), right):
            return Way.WHOLE, ""
    except Exception as error:
        why = f"{name} fails if it gets only some of the parameters: {class_and_line(error)}"
    return Way.NEITHER, why


class ShardTrial:
    """Small tensors in an optimizer's parameter groups, and their gradients for a few steps.

    Args:
        make: builds the optimizer to try.
        groups: with the real parameters; a trial has two tensors per group and number of dimensions.
    """

    def __init__(self, make: Make, groups: Sequence[dict[str, Any]]) -> None:
        self._make, self._groups = make, groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._device = parameters[0].device
        random = torch.Generator().manual_seed(0)

        def drawn(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, generator=random)

        self._numbers: list[list[int]] = []  # the tensors of each group
        self._begin: list[Tensor] = []
        for group in groups:
            kinds = sorted({max(1, parameter.ndim) for parameter in group["params"]})
            columns = [_COLUMNS[min(dims, 4) - 1] + (1,) * (dims - 4) for dims in kinds]
            shapes = [(rows, *of_rows) for of_rows in columns for rows in (_ROWS, 2)]
            self._numbers.append([*range(len(self._begin), len(self._begin) + len(shapes))])
            self._begin += [drawn(shape).to(self._device) for shape in shapes]
        # Each step has its large gradients in other rows, so that norms over shards differ from the whole.
        self._gradients = [
            [(drawn(t.shape) * _sizes(t, step)).to(self._device) for t in self._begin]
            for step in range(_STEPS)
        ]
        self.all_rows = {number: (0, len(tensor)) for number, tensor in enumerate(self._begin)}

    def cut(self, parts: int) -> list[dict[int, Rows]]:
        """Return the rows of each rank under FSDP; a third rank has no rows of a tensor of two rows."""
        return [
            {number: rows_of_shard(end, part, parts) for number, (_, end) in self.all_rows.items()}
            for part in range(parts)
        ]

    def shared(self, parts: int) -> list[dict[int, Rows]]:
        """Return whole tensors, assigned round-robin."""
        return [{n: rows for n, rows in self.all_rows.items() if n % parts == part} for part in range(parts)]

    def train(self, shares: Sequence[dict[int, Rows]], apart: bool = False) -> list[_Outcome]:
        """Train each share with its own optimizer.

        Args:
            apart: build each optimizer on shards, then give it whole tensors, as `WholeTensors` does.
        """
        return [self._trained(share, apart) for share in shares if share]

    def _trained(self, share: dict[int, Rows], apart: bool) -> _Outcome:
        own = self._parameters(share)
        optimizer = self._made(self._parameters(self.cut(2)[0]) if apart else own)
        if apart:
            update_only(optimizer, [[own[n] for n in numbers if n in own] for numbers in self._numbers])
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] = _LR
        for gradients in self._gradients:
            for number, (begin, end) in share.items():
                own[number].grad = gradients[number][begin:end].clone()
            with torch.compiler.set_stance("force_eager"), _Constant():
                optimizer.step()
        return _Outcome(
            {n: own[n].detach() - self._begin[n][begin:end] for n, (begin, end) in share.items()},
            {number: optimizer.state.get(parameter, {}) for number, parameter in own.items()},
            {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)},
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        )

    def _parameters(self, share: dict[int, Rows]) -> dict[int, nn.Parameter]:
        return {n: nn.Parameter(self._begin[n][begin:end].clone()) for n, (begin, end) in share.items()}

    def _made(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        return self._make(
            [
                {**group, "params": [parameters[n] for n in numbers if n in parameters]}
                for group, numbers in zip(self._groups, self._numbers, strict=True)
            ]
        )

    def is_right(self, found: Sequence[_Outcome], whole: Sequence[_Outcome]) -> bool:
        right = whole[0]
        for number, update in right.updates.items():
            holders = [each for each in found if number in each.updates]
            parts = [each.updates[number] for each in holders]
            if not _alike(torch.cat(parts), update):
                return False
            states = [leaves(each.states[number]) for each in holders]
            if not _fits(states, parts, leaves(right.states[number]), update.shape):
                return False
        shared = leaves([right.of_no_parameter, right.options])
        return all(_all_alike(leaves([each.of_no_parameter, each.options]), shared) for each in found)


def _fits(states: list[list[Any]], parts: list[Tensor], right: list[Any], shape: torch.Size) -> bool:
    """Return whether each part's state is its rows of the whole tensor's state, or equal to all of it."""
    if any(len(state) != len(right) for state in states):
        return False
    for values, whole in zip(zip(*states, strict=True), right, strict=True):
        if isinstance(whole, Tensor) and inner_tensors(whole) and len(parts) > 1:
            return False  # a checkpoint can't shard it
        if isinstance(whole, Tensor) and whole.shape == shape and not inner_tensors(whole):
            shapes = [value.shape for value in values if isinstance(value, Tensor)]
            if shapes != [part.shape for part in parts] or not _alike(torch.cat(values), whole):
                return False
        elif not all(_alike(value, whole) for value in values):
            return False
    return True


def _all_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if within := inner_tensors(one):
            return _all_alike([*within.values()], [*inner_tensors(other).values()])
        if not one.numel():
            return True
        one, other = (each.detach().to("cpu", torch.complex128) for each in (one, other))
        return bool((one - other).abs().max() <= _RELATIVE * other.abs().max() + _ABSOLUTE)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4)
    return type(one) is type(other) and (not isinstance(one, bool | int | str) or one == other)


def _sizes(tensor: Tensor, step: int) -> Tensor:
    """Return a scale for the gradients of each row, from 0.01 to 100."""
    sizes = torch.logspace(-2, 2, len(tensor)).roll(step * len(tensor) // 3)
    return sizes.view(-1, *[1] * (tensor.ndim - 1))


class _Constant(TorchDispatchMode):
    """Replace random numbers by 0.5, because a shard draws other noise than its rows of the whole tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in leaves(made):
                tensor.fill_(0.5)
        return made
