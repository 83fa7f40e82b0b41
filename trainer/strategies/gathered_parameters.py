"""FSDP's gathered parameters are copies that it frees: what a pass changes in them is lost."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainer.exact.turns import Turns
from trainer.local_shard import other_bits, own_rows, to_local

_PASSES_PER_UNIT = 4  # one unit in each pass would take 1 % of a small model's step on a CPU


class GatheredParameters:
    """Looks for gathered parameters that a forward or backward pass changes or replaces.

    After each unit's forward pass, and again after its backward pass, this rank's rows are compared with its
    shard: together, ranks compare all. This is so in the first passes; of the later ones, one in four
    compares one unit, drawn at random. Each step also reads version counters, in 0.1 us for each parameter;
    these do not count what is written through `p.data`.

    Args:
        model: sharded.

    Attributes:
        names: of all gathered parameters so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Tensor, str] = {}
        self._shards = dict(model.named_parameters(remove_duplicate=False))
        self._versions: dict[Tensor, int] = {}
        self._frozen: set[str] = set()  # in a pass: the next gather would train them again
        # Names, and by place whether each differs.
        self._compared: list[tuple[list[str], Tensor]] = []
        self._compared_backward: list[tuple[list[str], Tensor]] = []
        units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, FSDPModule)]
        self._units = [
            _GatheredUnit(number, name, cast(nn.Module, unit)) for number, (name, unit) in enumerate(units)
        ]
        # Evaluation may change others than training.
        self._turns = {training: Turns(len(units), _PASSES_PER_UNIT) for training in (True, False)}
        self._due: Sequence[int] = ()  # the numbers of the units to compare in this pass
        self._kept: set[_GatheredUnit] = set()  # to the end of this backward pass
        for unit in self._units:
            unit.module.register_forward_pre_hook(partial(self._begin, unit), with_kwargs=True)
            # Before FSDP's hook, which frees the unit.
            unit.module.register_forward_hook(partial(self._end_forward, unit), prepend=True)

    def changed(self, step_is_over: bool) -> list[str]:
        """The names of those that were changed on this rank, sorted.

        To be called when a GPU has finished the forward passes. What backward passes change is found by the
        next call, or if `step_is_over`.
        """
        by_version = [name for p, name in self.names.items() if p._version != self._versions[p]]
        ready, self._compared = self._compared, self._compared_backward
        self._compared_backward = []
        if step_is_over:
            ready, self._compared = ready + self._compared, []
        found = [name for names, flags in ready for name in compress(names, flags.tolist())]
        return sorted({*by_version, *found, *self._frozen})

    def compare_root(self) -> None:
        """Called after the loss, which may have changed the root's parameters since the root's call."""
        self._end_forward(self._units[0])

    def end_backward(self) -> None:
        """Called after each backward pass: compares and frees the units that were kept for it."""
        for unit in self._kept:
            self._compare(unit, self._compared_backward)
            sharded = cast(FSDPModule, unit.module)
            sharded.set_reshard_after_backward(True, recurse=False)
            sharded.reshard()
        self._kept.clear()

    def _begin(self, unit: "_GatheredUnit", module: nn.Module, *inputs: Any) -> None:
        """Called before a unit's forward pass, when FSDP has gathered it."""
        if unit.number == 0:  # the root
            self._due = self._turns[unit.module.training].next()
        if not unit.parameters:
            unit.parameters = dict(unit.gathered())
            self.names.update((p, name) for name, p in unit.parameters.items())
            self._versions.update((p, p._version) for p in unit.parameters.values())
        if unit.number in self._due and torch.is_grad_enabled():
            self._follow_backward(unit, inputs)

    def _follow_backward(self, unit: "_GatheredUnit", inputs: tuple[Any, ...]) -> None:
        """Have a unit compared at the end of its backward pass, before FSDP frees it.

        FSDP frees it in the node of the graph that made the inputs which FSDP's hook passed on. The hooks of
        modules and tensors in the unit come before. Without such inputs, as of token ids, FSDP keeps the unit
        to the end of the whole backward pass.
        """
        nodes = [each.grad_fn for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.grad_fn]
        if nodes:
            nodes[0].register_prehook(lambda _: self._compare(unit, self._compared_backward))
        else:
            cast(FSDPModule, unit.module).set_reshard_after_backward(False, recurse=False)
            self._kept.add(unit)

    def _end_forward(self, unit: "_GatheredUnit", *_: Any) -> None:
        """Called after a unit's forward pass; compares it if it is its turn."""
        self._frozen.update(
            name
            for name, p in unit.parameters.items()
            if not p.requires_grad and self._shards[name].requires_grad
        )
        if unit.number in self._due:
            self._compare(unit, self._compared)

    @torch.no_grad()
    def _compare(self, unit: "_GatheredUnit", compared: list[tuple[list[str], Tensor]]) -> None:
        now = {name: p for name, p in unit.gathered() if name in unit.parameters}
        flags = [self._differs(p, unit.parameters[name], self._shards[name]) for name, p in now.items()]
        if flags:
            compared.append((list(now), torch.stack(flags).to("cpu", non_blocking=True)))

    def _differs(self, now: Tensor, gathered: Tensor, shard: Tensor) -> Tensor:
        """Whether a gathered parameter was replaced, or its rows of this rank changed: a bool scalar."""
        if now is not gathered:
            return torch.ones((), dtype=torch.bool, device=gathered.device)
        rows = gathered.detach()[slice(*own_rows(shard))]
        return other_bits(rows, to_local(shard).to(rows.device, rows.dtype))


class _GatheredUnit:
    """A unit of `fully_shard`, and its parameters as gathered in the first pass: torch keeps the objects."""

    def __init__(self, number: int, name: str, module: nn.Module) -> None:
        self.number, self.module = number, module
        self._prefix = name
        self.parameters: Mapping[str, Tensor] = {}

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, and not those of units within it, while they are gathered."""
        named = self.module.named_parameters(self._prefix)
        return ((name, p) for name, p in named if not isinstance(p, DTensor))
