"""The model as its servers hold it: the module's names, without code, and parameters in shards."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.comm.parameter_server.layout import ShardedBucket
from trainer.local_shard import rows_of_shard


class ServerShards:
    """One rank's shard of every parameter, as DTensors over the servers; empty on ranks that are not servers.

    Attributes:
        values: a flat tensor for each bucket, to be sent: the parameters at the last call of `pack`.
        parameters: by name; each has its own memory, as a checkpoint's copy needs it.
    """

    def __init__(
        self, mesh: DeviceMesh, buckets: Sequence[ShardedBucket], shapes: Mapping[str, Tensor]
    ) -> None:
        coordinate = mesh.get_coordinate()
        self._mesh, self._buckets, self._shapes = mesh, buckets, shapes
        self.server = coordinate[0] if coordinate is not None else None
        self.values = [
            torch.empty(bucket.numels[self.server] if self.server is not None else 0, dtype=bucket.dtype)
            for bucket in buckets
        ]
        own = {name: value for flat in self._split(dict(enumerate(self.values))) for name, value in flat}
        self._locals = {name: torch.empty_like(value) for name, value in own.items()}
        self.parameters = {
            name: nn.Parameter(self._sharded(name, value), shapes[name].requires_grad)
            for name, value in self._locals.items()
        }

    def of(self, flat: Mapping[int, Tensor]) -> dict[str, DTensor]:
        """The tensors in `flat`, which is by bucket, by parameter name; they share its memory."""
        return {name: self._sharded(name, value) for part in self._split(flat) for name, value in part}

    def _split(self, flat: Mapping[int, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
        """This rank's rows of each parameter in `flat`; empty if it is not a server."""
        for index, values in flat.items():
            bucket, found = self._buckets[index], []
            for number, name in enumerate(bucket.names):
                local = values[:0]
                if self.server is not None:
                    span = bucket.row_ranges[self.server][number]
                    local = values[span.at : span.at + span.numel]
                    local = local.view(span.end - span.begin, *self._shapes[name].shape[1:])
                found.append((name, local))
            yield found

    def _sharded(self, name: str, local: Tensor) -> DTensor:
        full = self._shapes[name]
        return DTensor.from_local(
            local,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=full.shape,
            stride=torch.empty(full.shape, device="meta").stride(),
        )

    @torch.no_grad()
    def pack(self) -> None:
        """Update `values` from the parameters."""
        for part in self._split(dict(enumerate(self.values))):
            for name, target in part:
                target.copy_(self._locals[name])

    def broadcast(
        self, servers: Sequence[int], group: dist.ProcessGroup
    ) -> Iterator[tuple[ShardedBucket, int, Tensor]]:
        """Send every rank the parameters: yields a bucket, the number of a server and its rows of it."""
        self.pack()
        for bucket in self._buckets:
            for number, server in enumerate(servers):
                message = torch.empty(bucket.numels[number], dtype=bucket.dtype)
                if self.server == number:
                    message = self.values[bucket.index]
                if message.numel():
                    dist.broadcast(message.view(torch.uint8), src=server, group=group)  # of any dtype
                yield bucket, number, message

    def set_gradients(self, gradients: Mapping[int, Tensor], there: Tensor) -> None:
        """Set `gradients`, by bucket, as those of the shard; `there`: which trained parameters had any."""
        # Also without rows on this server: all servers keep state of the same parameters.
        none = {b.index: torch.empty(0, dtype=b.dtype) for b in self._buckets if b.trainable}
        sharded, had = self.of(none | dict(gradients)), iter(there.tolist())
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and next(had):
                parameter.grad = sharded[name]

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        """Copy this rank's rows of a full parameter."""
        local = self._locals[name]
        if self.server is not None and len(local):
            begin, end = rows_of_shard(len(value), self.server, self._mesh.size())
            local.copy_(value[begin:end])


def without_values(parameter: nn.Parameter) -> Tensor:
    """A tensor of its shape, dtype and requires_grad, on the meta device."""
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return like.requires_grad_(parameter.requires_grad)


def named_alike(model: nn.Module, parameters: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A module with the names, buffers and extra state of `model` and its submodules, and other parameters.

    A buffer that a forward pass assigns or registers later is included, too.
    """
    made = {module: _keeper(module) for module in model.modules()}
    for module, copy in made.items():
        for name, child in module._modules.items():
            copy.add_module(name, made[child] if child is not None else None)
        for name, parameter in module._parameters.items():
            copy.register_parameter(name, parameters[parameter] if parameter is not None else None)
        copy._buffers, copy._non_persistent_buffers_set = module._buffers, module._non_persistent_buffers_set
    return made[model]


def _keeper(module: nn.Module) -> nn.Module:
    """An empty module that passes on the extra state of `module`, if it has any."""
    names = ("get_extra_state", "set_extra_state")
    own = {name: staticmethod(getattr(module, name)) for name in names if _overrides(module, name)}
    return type(type(module).__name__, (nn.Module,), own)() if own else nn.Module()


def extra_states(model: nn.Module) -> list[nn.Module]:
    """The submodules with extra state."""
    return [module for module in model.modules() if _overrides(module, "get_extra_state")]


def _overrides(module: nn.Module, name: str) -> bool:
    return getattr(type(module), name) is not getattr(nn.Module, name)
