"""Update sharded parameters with optimizers that need whole tensors, such as Muon, LAMB or Adafactor."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.model.trainable_parameters import TrainableParameters
from trainer.tensors.bits import bytes_of
from trainer.tensors.local_shard import rows_of_shard


class _Owned(NamedTuple):
    """A sharded parameter, and the rank of `TrainableParameters.group` that updates it."""

    shard: nn.Parameter
    shape: torch.Size  # shape of the whole parameter
    owner: int
    whole: nn.Parameter | None  # on the owner only; empty between steps


class WholeTensors(Optimizer):
    """An optimizer that updates each parameter as a whole tensor on one rank, the parameter's owner.

    In a step, the owners gather the rows of weights and gradients, call `optimizer.step()`, and send the rows
    of the weights back, so each update is computed once. During a step, an owner needs memory for the whole
    weights and gradients of its parameters. Only the owner has the optimizer state of its parameters, as
    whole tensors, and saves it. A rank sends about three times the size of its shards, and receives about as
    much.
    """

    def __init__(self, optimizer: Optimizer, trainable: TrainableParameters) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        assert trainable.group is not None
        self.optimizer, self._ranks = optimizer, trainable.group
        self._all: dict[nn.Parameter, _Owned] = {}
        loads = [0] * self._ranks.size()
        named = [(trainable.names[shard], shard) for group in self.param_groups for shard in group["params"]]
        for name, shard in sorted(named, key=lambda pair: -trainable.whole[pair[0]].numel()):
            shape = trainable.whole[name].shape
            owner = trainable.owners.setdefault(name, loads.index(min(loads)))
            loads[owner] += shape.numel()
            whole = _freed(nn.Parameter(shard)) if owner == self._ranks.rank() else None
            self._all[shard] = _Owned(shard, shape, owner, whole)
        self._own_whole = {e.shard: e.whole for e in self._all.values() if e.whole is not None}
        update_only(
            optimizer,
            [
                [self._own_whole[p] for p in group["params"] if p in self._own_whole]
                for group in self.param_groups
            ],
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the shards. This is a collective of the ranks over which parameters are sharded."""
        given = [each for each in self._all.values() if each.shard.grad is not None]
        for each in given:
            if each.whole is not None:
                each.whole.data = each.shard.new_empty(each.shape)
                each.whole.grad = torch.empty_like(each.whole)
        both = [(e, [e.shard, e.shard.grad], [e.whole, getattr(e.whole, "grad", None)]) for e in given]
        self._move(both, to_owners=True)
        _copy_options(self.param_groups, self.optimizer.param_groups)
        if self._own_whole:
            self.optimizer.step()
            _copy_options(self.optimizer.param_groups, self.param_groups)
        self._move([(each, [each.shard], [each.whole]) for each in given], to_owners=False)
        states = self.optimizer.state
        for shard, whole in self._own_whole.items():
            _freed(whole)
            if whole in states:
                self.state[shard] = states[whole]
        self.state.update(_shared_state(states))

    def __setstate__(self, state: dict[str, Any]) -> None:  # called at the end of torch's load_state_dict
        super().__setstate__(state)
        loaded = {whole: self.state[shard] for shard, whole in self._own_whole.items() if shard in self.state}
        self.optimizer.state.update(loaded | _shared_state(self.state))

    def _move(self, moved: Sequence[tuple[_Owned, list[Any], list[Any]]], to_owners: bool) -> None:
        """Copy this rank's rows of each parameter into its owner's whole tensors, or back (a collective)."""
        num_ranks = self._ranks.size()
        by_owner: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        by_rank: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        for each, rows, wholes in moved:
            by_owner[each.owner] += rows
            for whole in wholes if each.whole is not None else []:
                for rank in range(num_ranks):
                    start, end = rows_of_shard(len(whole), rank, num_ranks)
                    by_rank[rank].append(whole[start:end])
        if moved:
            _exchange(*((by_owner, by_rank) if to_owners else (by_rank, by_owner)), self._ranks)


def update_only(optimizer: Optimizer, parameters: Sequence[list[nn.Parameter]]) -> None:
    """Make `optimizer`, which must be new, update `parameters` instead; its groups keep their options."""
    optimizer.param_groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, parameters, strict=True)
    ]
    optimizer.state = defaultdict(dict)


def updater(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer`, or the user's optimizer if `WholeTensors` wraps it."""
    return optimizer.optimizer if isinstance(optimizer, WholeTensors) else optimizer


def whole_parts(optimizer: Optimizer) -> list[WholeTensors]:
    """Return the parts of an optimizer that update whole tensors."""
    return [part for part in getattr(optimizer, "parts", [optimizer]) if isinstance(part, WholeTensors)]


def _exchange(
    sent: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], ranks: dist.ProcessGroup
) -> None:
    """Send each rank its tensors in `sent`, and receive tensors in `into`, of known sizes (a collective)."""
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


def _shared_state(states: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: state for key, state in states.items() if not isinstance(key, Tensor)}


def _freed(parameter: nn.Parameter) -> nn.Parameter:
    """Free the memory of `parameter` and its gradient, but keep the object as a key of the state."""
    parameter.data, parameter.grad = parameter.new_empty(0), None
    return parameter
