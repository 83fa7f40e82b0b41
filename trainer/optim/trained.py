"""The parameters that a run trains, and what the optimizer updates of each: all, or this rank's rows."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.local_shard import is_dtensor, to_local
from trainer.optim.plain_names import parameter_names


class Trained:
    """The parameters of `model` that require gradients, by their names in the plain module.

    Those that FSDP sharded are DTensors. In their place the optimizer has plain parameters in the memory of
    this rank's shards: torch's first step of 1,000 DTensors takes half a minute, and each later one three
    times as long. A shard gets its gradient for the time of an update.

    Args:
        model: unwrapped; its parameters stay where they are.

    Attributes:
        whole: the model's own.
        own: what the optimizer updates, in the same order; a shard may have no rows.
        group: the ranks that together hold the rows of a parameter; None if each holds all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.whole = {name: p for name, p in parameter_names(model) if p.requires_grad}
        self.own = {name: _own_part(p) for name, p in self.whole.items()}
        self.group: ProcessGroup | None = None
        for parameter in self.whole.values():
            if is_dtensor(parameter):
                self.group = parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
        self._names = {own: name for name, own in self.own.items()}
        pairs: Iterable[tuple[nn.Parameter, Any]] = zip(self.own.values(), self.whole.values(), strict=True)
        self._shards = [(own, whole) for own, whole in pairs if own is not whole]
        self._is_looked_at = False

    def name_of(self, own: nn.Parameter) -> str:
        return self._names[own]

    @property
    def is_sharded(self) -> bool:
        return self.group is not None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the shards their gradients, not copied: after the last backward pass of a step."""
        if not self._is_looked_at:
            self._follow()
        for own, whole in self._shards:
            gradient = whole.grad
            own.grad = None if gradient is None else gradient.to_local()

    def drop_gradients(self) -> None:
        """Called after the update."""
        for own in self.own.values():
            own.grad = None
        for _, whole in self._shards:
            whole.grad = None

    def _follow(self) -> None:
        """Use the memory that shards have now: FSDP's first pass may pad them, or pin them for a GPU."""
        for own, whole in self._shards:
            if own.data_ptr() != (shard := to_local(whole)).data_ptr():
                own.data = shard
        self._is_looked_at = True

    def as_rows(self, name: str, value: Any) -> Any:
        """`value` of the optimizer's state, not copied; as a DTensor if it has the shape of its shard.

        So a checkpoint knows which rows of which tensor these are.
        """
        if not self.is_sharded or name not in self.own:
            return value
        own, whole = self.own[name], self.whole[name]
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != own.shape:
            return value
        from torch.distributed.tensor import DTensor

        assert is_dtensor(whole)
        mesh, placements = whole.device_mesh, whole.placements
        return DTensor.from_local(value, mesh, placements, shape=whole.shape, stride=whole.stride())


def _own_part(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(to_local(parameter)) if is_dtensor(parameter) else parameter
