"""The parameters that a run trains, as whole tensors or as this rank's shards."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.plain_names import parameter_names
from trainer.tensors.local_shard import inner_tensors, is_dtensor, sharded_like, to_local
from trainer.torch_private import foreach_norm


class TrainableParameters:
    """The parameters of `model` that a run has trained so far, by their plain names.

    Parameters that FSDP has sharded are DTensors. The optimizer gets plain parameters instead, which share
    the memory of this rank's shards, because torch's optimizers are slow with DTensors: the first step takes
    time quadratic in their number (8 s for 1,000), and each later step three times as long. Shards have
    gradients only during an update.

    Args:
        also: names of frozen parameters to include, because the run has trained them before.

    Attributes:
        whole: the parameters of the model, by name.
        own: the parameters that the optimizer updates, by name, in the same order; a shard may have no rows.
        names: the name of each parameter in `own`.
        group: the ranks over which parameters are sharded; None if they are not sharded.
        owners: for sharded parameters that are updated as whole tensors, the rank of `group` that updates
            each of them, and has its optimizer state.
    """

    def __init__(
        self, model: nn.Module, also: Collection[str] = (), owners: Mapping[str, int] | None = None
    ) -> None:
        self.model = model
        self._all = dict(parameter_names(model))
        self._parameters = list(self._all.values())
        self._flags = [p.requires_grad for p in self._parameters]
        self.whole = {name: p for name, p in self._all.items() if p.requires_grad or name in also}
        self.own = {n: nn.Parameter(to_local(p)) if is_dtensor(p) else p for n, p in self.whole.items()}
        self.names = {own: name for name, own in self.own.items()}
        pairs: Iterable[tuple[nn.Parameter, Any]] = zip(self.own.values(), self.whole.values(), strict=True)
        self._shards = [(own, whole) for own, whole in pairs if own is not whole]
        self.group: dist.ProcessGroup | None = None
        self.owners = dict(owners or {})
        if self._shards:
            mesh = self._shards[0][1].device_mesh
            self.group = mesh.get_group(mesh.ndim - 1)
        self._has_memory = False
        self._is_homogeneous = len({(own.device, own.dtype) for own in self.own.values()}) == 1

    @property
    def is_sharded(self) -> bool:
        return self.group is not None

    def is_elsewhere(self, name: str) -> bool:
        """Return whether another rank, and not this one, has the optimizer state of this parameter."""
        return self.group is not None and self.owners.get(name, self.group.rank()) != self.group.rank()

    def writer_of(self, name: str) -> int:
        """Return the rank that saves the state of a parameter in `owners`: its owner in the first replica."""
        whole = self.whole[name]
        assert is_dtensor(whole)
        mesh = whole.device_mesh.mesh
        return int(mesh.reshape(-1, mesh.shape[-1])[0, self.owners[name]])

    def has_changed(self) -> bool:
        """Return whether `requires_grad` of any parameter has changed since the last `accept`."""
        return [p.requires_grad for p in self._parameters] != self._flags

    def changed(self) -> list[str]:
        """Return the names of the parameters whose `requires_grad` has changed since the last `accept`."""
        pairs = zip(self._all.items(), self._flags, strict=True)
        return [name for (name, parameter), flag in pairs if parameter.requires_grad != flag]

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model that require gradients now."""
        return {name: parameter for name, parameter in self._all.items() if parameter.requires_grad}

    def accept(self) -> list[str]:
        """Record `requires_grad` of all parameters, and return the names of newly trainable parameters."""
        self._flags = [p.requires_grad for p in self._parameters]
        return [name for name in self.trainable() if name not in self.whole]

    @torch.no_grad()
    def attach_gradients(self) -> None:
        """Set the gradients of shards, without copying, after the last backward pass of a step."""
        if not self._has_memory:
            self._update_memory()
        for own, whole in self._shards:
            gradient = whole.grad
            own.grad = None if gradient is None else gradient.to_local()

    def drop_gradients(self) -> None:
        """Set all gradients to None, after the update."""
        for own in self.own.values():
            own.grad = None
        for _, whole in self._shards:
            whole.grad = None

    def _update_memory(self) -> None:
        """Point `own` to the shards' current memory, because FSDP's first pass may have moved them."""
        for own, whole in self._shards:
            if own.data_ptr() != (shard := to_local(whole)).data_ptr():
                own.data = shard
        self._has_memory = True

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients as a scalar; if they are sharded, a collective over `group`."""
        given = [own.grad for own in self.own.values() if own.grad is not None]
        # torch 2.11 cannot compute the norm of sparse gradients.
        gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in given]
        if self.group is None and self._is_homogeneous and gradients:  # takes a third of the time of torch's
            return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
        if self.group is None or not gradients:
            return nn.utils.get_total_norm(gradients)
        squares = torch.stack(foreach_norm(gradients)) ** 2
        dist.all_reduce(squares, group=self.group)
        return torch.linalg.vector_norm(squares**0.5)

    def as_rows(self, name: str, value: Any) -> Any:
        """Return `value`, a part of the optimizer's state, as a DTensor if it has the shape of the shard.

        The DTensor, which shares memory with `value`, tells a checkpoint which rows `value` contains.
        """
        if not self.is_sharded or name not in self.own or name in self.owners:
            return value
        own = self.own[name]
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != own.shape:
            return value
        if inner_tensors(value):
            raise UserError(
                f"optim: the state of {name} is a {type(value).__name__}, a tensor subclass that contains "
                "several tensors, which a checkpoint cannot shard; use strategy=ddp, or optim=adamw"
            )
        return self.sharded(name, value)

    def sharded(self, name: str, rows: Tensor) -> Tensor:
        """Return a DTensor whose local shard is `rows` (not copied), sharded like the parameter."""
        whole = self.whole[name]
        assert is_dtensor(whole)
        return sharded_like(whole, rows)
