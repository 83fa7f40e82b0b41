"""A trial on small tensors that shows whether an optimizer can update shards or needs whole tensors."""

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
_LR = 0.1  # instead of the real rate, with which updates might be lost in rounding
_RELATIVE, _ABSOLUTE = 1e-3, 5e-6  # fused kernels round the last elements of a tensor differently


class Needs(IntEnum):
    """What an optimizer needs for correct updates; if ranks' results differ, the largest member applies."""

    SHARDS = 0
    WHOLE = 1
    NEITHER = 2


Rows = tuple[int, int]
"""The first row, and one past the last row."""


@dataclass
class _Outcome:
    """The result of an optimizer in a trial; updates and states are keyed by tensor number."""

    updates: dict[int, Tensor]
    states: dict[int, Any]
    shared_state: dict[Any, Any]
    options: list[dict[str, Any]]


def needs_whole_tensors(name: str, make: Make, groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether an optimizer needs whole tensors, because it updates shards differently (a collective).

    Small tensors with the same numbers of dimensions as the parameters are updated for a few steps in three
    ways: as whole tensors by one optimizer; as shards, with one optimizer per rank; and as whole tensors that
    are divided among three optimizers. The updates, the state and the group options must be equal. A
    checkpoint must be able to store the state: each tensor of the state must have the shape of its parameter,
    or be the same for all shards.
    """
    results: list[Any] = [None] * dist.get_world_size()

    def find() -> None:
        accelerator.use(groups[0]["params"][0].device)  # for this thread
        with generators_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = needs_of(name, ShardTrial(make, groups))
        dist.all_gather_object(results, result)

    with ThreadPoolExecutor(1) as thread:  # in which modes of the caller, such as fake tensors, are inactive
        thread.submit(find).result()
    needs, reason = max(results)
    if needs is Needs.NEITHER:
        raise UserError(f"optim: {reason}; with strategy=fsdp use optim=adamw, or use strategy=ddp")
    return bool(needs)


def needs_of(name: str, trial: "ShardTrial") -> tuple[Needs, str]:
    """Return what the optimizer of `trial` needs, and the reason if it cannot be used."""
    try:
        expected = trial.train([trial.all_rows])
    except Exception as error:  # the user's code may raise anything
        return Needs.NEITHER, f"a trial of {name} on small tensors failed with {class_and_line(error)}"
    try:
        if all(trial.is_correct(trial.train(trial.sharded(n)), expected) for n in (2, 3)):
            return Needs.SHARDS, ""
    except Exception:  # for example, the maximum of a shard without rows
        pass
    reason = f"{name} computes the update of a parameter from other parameters, which may be on other ranks"
    try:
        if trial.is_correct(trial.train(trial.divided(3), by_owner=True), expected):
            return Needs.WHOLE, ""
    except Exception as error:
        reason = f"{name} fails if it gets only some of the parameters: {class_and_line(error)}"
    return Needs.NEITHER, reason


class ShardTrial:
    """Small tensors on which to test whether an optimizer can update shards."""

    def __init__(self, make: Make, groups: Sequence[dict[str, Any]]) -> None:
        self._make, self._groups = make, groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._device = parameters[0].device
        random = torch.Generator().manual_seed(0)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, generator=random)

        self._numbers: list[list[int]] = []  # the tensors of each group
        self._initial: list[Tensor] = []
        for group in groups:
            kinds = sorted({max(1, parameter.ndim) for parameter in group["params"]})
            columns = [_COLUMNS[min(dims, 4) - 1] + (1,) * (dims - 4) for dims in kinds]
            shapes = [(rows, *row_shape) for row_shape in columns for rows in (_ROWS, 2)]
            self._numbers.append([*range(len(self._initial), len(self._initial) + len(shapes))])
            self._initial += [normal(shape).to(self._device) for shape in shapes]
        # Each step has large gradients in different rows, so that norms of shards and whole tensors differ.
        self._gradients = [
            [(normal(t.shape) * _sizes(t, step)).to(self._device) for t in self._initial]
            for step in range(_STEPS)
        ]
        self.all_rows = {number: (0, len(tensor)) for number, tensor in enumerate(self._initial)}

    def sharded(self, parts: int) -> list[dict[int, Rows]]:
        """Return the rows of each rank under FSDP; a third rank gets no rows of a tensor with two rows."""
        return [
            {number: rows_of_shard(end, part, parts) for number, (_, end) in self.all_rows.items()}
            for part in range(parts)
        ]

    def divided(self, parts: int) -> list[dict[int, Rows]]:
        """Divide the tensors among `parts` ranks round-robin; each tensor keeps all its rows."""
        return [{n: rows for n, rows in self.all_rows.items() if n % parts == part} for part in range(parts)]

    def train(self, parts: Sequence[dict[int, Rows]], by_owner: bool = False) -> list[_Outcome]:
        """Train each part with its own optimizer; if `by_owner`, the optimizer gets whole tensors."""
        return [self._train_part(part, by_owner) for part in parts if part]

    def _train_part(self, part: dict[int, Rows], by_owner: bool) -> _Outcome:
        own = self._parameters(part)
        optimizer = self._build(self._parameters(self.sharded(2)[0]) if by_owner else own)
        if by_owner:
            update_only(optimizer, [[own[n] for n in numbers if n in own] for numbers in self._numbers])
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] = _LR
        for gradients in self._gradients:
            for number, (start, end) in part.items():
                own[number].grad = gradients[number][start:end].clone()
            with torch.compiler.set_stance("force_eager"), _Constant():
                optimizer.step()
        return _Outcome(
            {n: own[n].detach() - self._initial[n][start:end] for n, (start, end) in part.items()},
            {number: optimizer.state.get(parameter, {}) for number, parameter in own.items()},
            {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)},
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        )

    def _parameters(self, part: dict[int, Rows]) -> dict[int, nn.Parameter]:
        return {n: nn.Parameter(self._initial[n][start:end].clone()) for n, (start, end) in part.items()}

    def _build(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        return self._make(
            [
                {**group, "params": [parameters[n] for n in numbers if n in parameters]}
                for group, numbers in zip(self._groups, self._numbers, strict=True)
            ]
        )

    def is_correct(self, outcomes: Sequence[_Outcome], whole: Sequence[_Outcome]) -> bool:
        """Return whether updates, states and options equal those of a single optimizer with whole tensors."""
        expected = whole[0]
        for number, update in expected.updates.items():
            with_rows = [outcome for outcome in outcomes if number in outcome.updates]
            parts = [outcome.updates[number] for outcome in with_rows]
            if not _equal(torch.cat(parts), update):
                return False
            states = [leaves(outcome.states[number]) for outcome in with_rows]
            if not _fits(states, parts, leaves(expected.states[number]), update.shape):
                return False
        shared = leaves([expected.shared_state, expected.options])
        return all(_all_equal(leaves([o.shared_state, o.options]), shared) for o in outcomes)


def _fits(states: list[list[Any]], parts: list[Tensor], expected: list[Any], shape: torch.Size) -> bool:
    """Return whether the state of each part is the same rows of the whole tensor's state, or all of it."""
    if any(len(state) != len(expected) for state in states):
        return False
    for values, whole in zip(zip(*states, strict=True), expected, strict=True):
        if isinstance(whole, Tensor) and inner_tensors(whole) and len(parts) > 1:
            return False  # a checkpoint cannot shard it
        if isinstance(whole, Tensor) and whole.shape == shape and not inner_tensors(whole):
            shapes = [value.shape for value in values if isinstance(value, Tensor)]
            if shapes != [part.shape for part in parts] or not _equal(torch.cat(values), whole):
                return False
        elif not all(_equal(value, whole) for value in values):
            return False
    return True


def _all_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if inner := inner_tensors(one):
            return _all_equal([*inner.values()], [*inner_tensors(other).values()])
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
    """Replace random numbers with 0.5, because a shard would draw different noise than a whole tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in leaves(result):
                tensor.fill_(0.5)
        return result
