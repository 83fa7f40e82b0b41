"""The strategies of a run on simulated devices, without other ranks.

cpu:0, cpu:1 and so on represent the devices of a process, and cpu its host's memory, if a strategy keeps
tensors there; otherwise cpu represents its only device.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.server import Mean, Server
from trainer.config import Config, FsdpConfig, ParameterServerConfig
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.base import Computing
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
    """Simulate the strategy of `config`; `gpus` is the number of the host's GPUs.

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
        raise UserError(
            f"strategy=dp on {gpus} GPUs is not predicted; use strategy=ddp, or --per-host 1 for one GPU"
        )
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
