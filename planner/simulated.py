"""The strategies of a run on simulated devices, without other ranks.

cpu:0, cpu:1 and so on represent the devices of a process, and cpu its host's memory, if a strategy keeps
tensors there; otherwise cpu represents its only device.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.server import Mean, Server
from trainer.config import Config, FsdpConfig, ParameterServerConfig
from trainer.distributed.process_group import Dist
from trainer.nested import leaves, mapped
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.base import Computing, Fill
from trainer.strategies.data_parallel import to_gather
from trainer.strategies.parameter_server.synchronous import ParameterServer

CPU = torch.device("cpu")
FIRST = torch.device("cpu", 0)


@dataclasses.dataclass(frozen=True)
class PlacedStrategy:
    """A strategy and the devices on which it keeps tensors, by names for people; the first is its own.

    `host` is where it keeps tensors off the devices, if it does.
    """

    strategy: Strategy
    devices: Mapping[str, torch.device]
    host: torch.device | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self.devices.values()))


def simulated_strategy(config: Config, dist: Dist, gpus: int) -> PlacedStrategy:
    """Simulate the strategy of `config`; `gpus` is the number of the host's GPUs, all of which dp uses.

    Raises:
        UserError: the run's own errors.
    """
    settings, computing = config.strategy, Computing(config.train.precision)
    if isinstance(settings, FsdpConfig):  # offloaded tensors are separated later: here all are on one device
        settings = dataclasses.replace(settings, cpu_offload=False)
        return PlacedStrategy(build_strategy(dataclasses.replace(config, strategy=settings), dist), {"": CPU})
    if isinstance(settings, ParameterServerConfig):
        dist = dataclasses.replace(dist, device=FIRST)
        server = Unconnected(settings, dist, computing, config.distributed.timeout_s)
        return PlacedStrategy(server, {"": FIRST}, host=CPU)
    if settings.name == "dp" and gpus > 1:
        devices = {"first GPU": FIRST, "each other": torch.device("cpu", 1)}
        return PlacedStrategy(_Scattering(list(devices.values()), gpus, computing), devices)
    strategy = _Whole(CPU, computing)
    strategy.num_replicas = dist.world_size
    return PlacedStrategy(strategy, {"": CPU})


class _Whole(Strategy):
    """A whole model; for DDP without its C++ buckets, which need tensors with memory."""

    def move_to_devices(self, model: nn.Module) -> nn.Module:
        return model


class Unconnected(ParameterServer):
    """The memory of one rank of a parameter server: messages, shards, pushed gradients."""

    def move_to_devices(self, model: nn.Module) -> nn.Module:
        return model

    def _connect(self, model: nn.Module) -> None:
        nobody: Any = None
        if self.serves:
            links = dict.fromkeys(self.workers, nobody)
            index = self.servers.index(self.dist.rank)
            self._server = Server(index, links, self.buckets, self._shards.values, self._shards.pack)
            self._mean = Mean(self._server)
        if self.trains:
            self._client = Client([nobody] * len(self.servers), self.buckets, self._parameters)

    @contextmanager
    def gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        yield

    def aggregate(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        if self._server is not None:
            for name, gradient in self._shards.of(self._mean.gradients).items():
                self._shards.parameters[name].grad = gradient


class _Scattering(Strategy):
    """nn.DataParallel; the first of its GPUs and one of the others are simulated."""

    def __init__(self, devices: list[torch.device], count: int, computing: Computing) -> None:
        super().__init__(devices[0], computing)
        self._other, self._count = devices[1], count

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        fill(model)
        return _Scattered(model, self._other, self._count)

    def unwrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, _Scattered)
        return model.module


class _Scattered(nn.Module):
    """The memory of nn.DataParallel, derived from torch's code (torch/nn/parallel), since it needs GPUs.

    Each GPU gets a part of the batch, and each but the first a copy of the model for one forward and
    backward pass. The gradients of all copies are kept until the last is complete, then added in new memory
    on the first GPU, which also gathers the outputs.
    """

    def __init__(self, module: nn.Module, other: torch.device, count: int) -> None:
        super().__init__()
        self.module, self._other, self._count = module, other, count

    def forward(self, *inputs: Any, **named: Any) -> Any:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        given = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        rest = {name: tensor.to(self._other) for name, tensor in given.items() if name not in trained}
        replicas = _Broadcast.apply(self._other, *trained.values())
        first = dict(zip(trained, replicas[: len(trained)], strict=True))
        other = dict(zip(trained, replicas[len(trained) :], strict=True)) | rest
        lengths = [len(leaf) for leaf in leaves((inputs, named)) if isinstance(leaf, Tensor) and leaf.ndim]

        def part(value: Any) -> Any:
            is_plain = not isinstance(value, Tensor) or value.ndim == 0
            return value if is_plain else value[: -(-len(value) // self._count)]

        def moved(value: Any) -> Any:
            return value.to(self._other) if isinstance(value, Tensor) else value

        parts = mapped((inputs, named), part)
        outputs = to_gather(functional_call(self.module, first, *parts))
        others = iter(leaves(functional_call(self.module, other, *mapped(parts, moved))))
        return mapped(outputs, lambda one: _Gather.apply(lengths[0], one, next(others)))


class _Broadcast(Function):
    """The tensors, and copies of them on another GPU; sums the gradients, once all are complete."""

    @staticmethod
    def forward(ctx: Any, other: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (*tensors, *(tensor.to(other) for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        count = len(gradients) // 2
        pairs = zip(gradients[:count], gradients[count:], strict=True)
        return None, *(first + other.to(first.device) for first, other in pairs)


class _Gather(Function):
    """The outputs of all GPUs gathered on the first; splits the gradient for two of them."""

    @staticmethod
    def forward(ctx: Any, length: int, first: Tensor, other: Tensor) -> Tensor:
        ctx.part, ctx.other = len(first), other.device
        return first.new_empty((length, *first.shape[1:]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, gradient[: ctx.part], gradient[-ctx.part :].to(ctx.other)
