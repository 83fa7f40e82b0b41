"""Update sharded parameters with an optimizer that needs whole tensors, such as Muon, LAMB or Adafactor."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.optim.trained import Trained
from trainer.tensors.bits import bytes_of
from trainer.tensors.local_shard import is_dtensor, rows_of_shard, tensors_within, to_local
from trainer.tensors.nested import leaves, mapped


@dataclass(eq=False)
class _Owned:
    """A sharded parameter, and the rank of `Trained.group` that updates it."""

    shard: nn.Parameter
    name: str
    shape: torch.Size  # of the whole parameter
    owner: int
    whole: nn.Parameter | None  # on the owner only; empty between steps

    def is_alike(self, value: Any) -> bool:
        """Return whether `value` in the optimizer's state has the parameter's shape, and so its sharding."""
        return isinstance(value, Tensor) and value.shape == self.shape and not tensors_within(value)


class WholeTensors(Optimizer):
    """Update each parameter as a whole tensor on one rank, the parameter's owner.

    In a step, the owners gather the rows of weights and gradients, call `optimizer.step()`, and send the rows
    of the weights back, so each update is computed once. During a step an owner needs memory for the whole
    weights and gradients of its parameters. It keeps their whole state between steps; the state is sharded
    only for a save. A rank sends and receives three times the size of its shards.

    Args:
        optimizer: a new optimizer of shards in `trained`. This object takes over its groups; from now on,
            `optimizer` updates the whole parameters that this rank owns.
    """

    def __init__(self, optimizer: Optimizer, trained: Trained) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        assert trained.group is not None
        self.optimizer, self._trained, self._ranks = optimizer, trained, trained.group
        self._has_loaded = False
        self._all: dict[nn.Parameter, _Owned] = {}
        loads = [0] * self._ranks.size()
        named = [(trained.names[shard], shard) for group in self.param_groups for shard in group["params"]]
        for name, shard in sorted(named, key=lambda each: -trained.whole[each[0]].numel()):
            owner, shape = loads.index(min(loads)), trained.whole[name].shape
            loads[owner] += shape.numel()
            whole = _freed(nn.Parameter(shard)) if owner == self._ranks.rank() else None
            self._all[shard] = _Owned(shard, name, shape, owner, whole)
        trained.updated_whole.update(name for name, _ in named)
        wholes = [[self._all[shard].whole for shard in group["params"]] for group in self.param_groups]
        update_only(optimizer, [[whole for whole in group if whole is not None] for group in wholes])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the shards (a collective of the ranks that hold them)."""
        if self._has_loaded:
            self._collect()
        given = [each for each in self._all.values() if each.shard.grad is not None]
        mine = [each.whole for each in self._all.values() if each.whole is not None]
        for each in given:
            if each.whole is not None:
                each.whole.data = each.shard.new_empty(each.shape)
                each.whole.grad = torch.empty_like(each.whole)
        both = [(e, [e.shard, e.shard.grad], [e.whole, getattr(e.whole, "grad", None)]) for e in given]
        self._move(both, to_owners=True)
        _copy_options(self.param_groups, self.optimizer.param_groups)
        if mine:
            self.optimizer.step()
            _copy_options(self.optimizer.param_groups, self.param_groups)
        self._move([(each, [each.shard], [each.whole]) for each in given], to_owners=False)
        for whole in mine:
            _freed(whole)
        self.drop_rows()

    def __setstate__(self, state: dict[str, Any]) -> None:  # the last call of torch's load_state_dict
        super().__setstate__(state)
        self._has_loaded = any(shard in self.state for shard in self._all)

    def _collect(self) -> None:
        """Give each owner the loaded state of its parameters (a collective)."""
        states, moved = self.optimizer.state, []
        states.clear()
        for shard, each in self._all.items():
            loaded = self.state.pop(shard, {})
            rows = [leaf for leaf in leaves(loaded) if is_dtensor(leaf)]
            wholes: list[Any] = [None] * len(rows)
            if each.whole is not None and loaded:
                wholes = [shard.new_empty(row.shape, dtype=row.dtype) for row in rows]
                states[each.whole] = _replaced(loaded, rows, wholes)
            moved.append((each, [to_local(row) for row in rows], wholes))
        self._move(moved, to_owners=True)
        states.update(_of_no_parameter(self.state))
        self._has_loaded = False

    @torch.no_grad()
    def keep_rows(self) -> None:
        """Fill `self.state`, with DTensors for sharded state and all other state in full (a collective)."""
        if self._has_loaded:
            return  # the loaded rows are there, and no step has changed them
        states, moved = self.optimizer.state, []
        told: dict[str, Any] = {}  # with meta tensors in place of those that are moved
        for each in self._all.values():
            if each.whole is not None and each.whole in states:
                found = leaves(states[each.whole])
                sent = [leaf.to("meta") if each.is_alike(leaf) else _on_host(leaf) for leaf in found]
                told[each.name] = _replaced(states[each.whole], found, sent)
        everyones: list[Any] = [None] * self._ranks.size()
        dist.all_gather_object(everyones, (told, _of_no_parameter(states)), group=self._ranks)
        self.state.update(everyones[0][1])
        told = {name: state for theirs, _ in everyones for name, state in theirs.items()}
        for shard, each in self._all.items():
            if each.name in told:
                empty = [leaf for leaf in leaves(told[each.name]) if each.is_alike(leaf)]
                rows = [shard.new_empty(shard.shape, dtype=leaf.dtype) for leaf in empty]
                dtensors = [self._trained.sharded(each.name, row) for row in rows]
                self.state[shard] = _replaced(told[each.name], empty, dtensors)
                wholes: list[Any] = [None] * len(rows)
                if each.whole is not None:
                    wholes = [leaf for leaf in leaves(states[each.whole]) if each.is_alike(leaf)]
                moved.append((each, rows, wholes))
        self._move(moved, to_owners=False)

    def drop_rows(self) -> None:
        """Reduce `self.state` to the state of the parameters that this rank owns."""
        if not self._has_loaded:
            for shard, each in self._all.items():
                self.state.pop(shard, None)
                if each.whole is not None and each.whole in self.optimizer.state:
                    self.state[shard] = self.optimizer.state[each.whole]

    def _move(self, moved: Sequence[tuple[_Owned, list[Any], list[Any]]], to_owners: bool) -> None:
        """Copy this rank's rows into the owners' whole tensors, or back (a collective).

        Args:
            moved: for each parameter, the rows of tensors and the whole tensors, None except on the owner.
        """
        num_ranks = self._ranks.size()
        by_owner: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        by_rank: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        for each, rows, wholes in moved:
            by_owner[each.owner] += rows
            for whole in wholes if each.whole is not None else []:
                for rank in range(num_ranks):
                    begin, end = rows_of_shard(len(whole), rank, num_ranks)
                    by_rank[rank].append(whole[begin:end])
        if any(rows for _, rows, _ in moved):
            _exchange(*((by_owner, by_rank) if to_owners else (by_rank, by_owner)), self._ranks)


def update_only(optimizer: Optimizer, parameters: Sequence[list[nn.Parameter]]) -> None:
    """Replace the parameters of `optimizer`, which must be new; its groups keep their options."""
    optimizer.param_groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, parameters, strict=True)
    ]
    optimizer.state = defaultdict(dict)


def updater(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer`, or the user's optimizer if `WholeTensors` wraps it."""
    return optimizer.optimizer if isinstance(optimizer, WholeTensors) else optimizer


def whole_parts(optimizer: Optimizer) -> list[WholeTensors]:
    return [part for part in getattr(optimizer, "parts", [optimizer]) if isinstance(part, WholeTensors)]


@contextmanager
def state_in_rows(optimizer: Optimizer) -> Iterator[None]:
    """Shard the optimizer state within this context, for a save (a collective)."""
    for part in whole_parts(optimizer):
        part.keep_rows()
    yield
    for part in whole_parts(optimizer):
        part.drop_rows()


def _exchange(
    sent: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], ranks: dist.ProcessGroup
) -> None:
    """Send each rank its tensors, and receive tensors of known sizes in `into` (a collective)."""
    pieces = [bytes_of(tensor) for tensors in sent for tensor in tensors]
    targets = [tensor for tensors in into for tensor in tensors]
    message = torch.cat(pieces) if pieces else targets[0].new_empty(0, dtype=torch.uint8)
    to_send, to_receive = ([sum(t.nbytes for t in tensors) for tensors in side] for side in (sent, into))
    received = message.new_empty(sum(to_receive))
    dist.all_to_all_single(received, message, to_receive, to_send, group=ranks)
    for target, piece in zip(targets, received.split([t.nbytes for t in targets]), strict=True):
        target.copy_(piece.clone().view(target.dtype).view(target.shape))  # a clone is aligned for any dtype


def _copy_options(groups: Sequence[dict[str, Any]], into: Sequence[dict[str, Any]]) -> None:
    for group, other in zip(groups, into, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


def _of_no_parameter(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of an optimizer's state that belong to no single parameter."""
    return {key: state for key, state in states.items() if not isinstance(key, Tensor)}


def _replaced(tree: Any, leaves_of_it: Sequence[Any], others: Sequence[Any]) -> Any:
    """Return `tree` with some of its leaves replaced by `others`."""
    by_id = {id(leaf): other for leaf, other in zip(leaves_of_it, others, strict=True)}
    return mapped(tree, lambda value: by_id.get(id(value), value))


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _freed(parameter: nn.Parameter) -> nn.Parameter:
    """Free the memory of `parameter` and its gradient; the object stays the key of the optimizer's state."""
    parameter.data, parameter.grad = parameter.new_empty(0), None
    return parameter
