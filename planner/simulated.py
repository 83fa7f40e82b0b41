"""The strategies of a run on a simulated device, without other ranks."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.comm.parameter_server import Exchange
from trainer.config import Config, FsdpConfig, ParameterServerConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.strategies.build import build_strategy
from trainer.strategies.parameter_server import ParameterServer

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class PlacedStrategy:
    """A strategy, and the devices of its tensors by name, starting with the device of the strategy itself."""

    strategy: Strategy
    devices: Mapping[str, torch.device]

    @property
    def device(self) -> torch.device:
        return next(iter(self.devices.values()))


def simulated_strategy(config: Config, ranks: Ranks, gpus: int) -> PlacedStrategy:
    """Simulate the strategy of `config` on a host with `gpus` GPUs.

    Raises:
        UserError: if the run would raise it, or for strategy=dp on several GPUs.
    """
    settings, compute = config.strategy, ComputeOptions(config.train.precision)
    if isinstance(settings, FsdpConfig):  # `Stage` subtracts offloaded tensors later
        settings = dataclasses.replace(settings, cpu_offload=False)
        return PlacedStrategy(
            build_strategy(dataclasses.replace(config, strategy=settings), ranks), {"": CPU}
        )
    if isinstance(settings, ParameterServerConfig):
        server = _Unconnected(settings, ranks, compute, config.distributed.timeout_s)
        return PlacedStrategy(server, {"": CPU})
    if settings.name == "dp" and gpus > 1:
        raise UserError(
            f"strategy=dp on {gpus} GPUs is not supported by the planner; use strategy=ddp, or --per-host 1 "
            "for one GPU"
        )
    strategy = _Whole(CPU, compute)
    strategy.num_replicas = ranks.world_size
    return PlacedStrategy(strategy, {"": CPU})


class _Whole(Strategy):
    """A strategy with the whole model on one device, without DDP's C++ buckets, which need real tensors."""

    def _place(self, model: nn.Module) -> nn.Module:
        return model


class _Unconnected(ParameterServer):
    """A rank under strategy=parameter_server, with simulated messages."""

    def _place(self, model: nn.Module) -> nn.Module:
        return model

    def connect(self, parameters: list[nn.Parameter]) -> Exchange:
        bucket_bytes = int(self.settings.bucket_mb * 2**20)
        return _WithoutValues(parameters, self.servers, self.workers, self.ranks.rank, None, bucket_bytes)

    def aggregate(self, model: nn.Module) -> None:
        self.exchange.push()
        self.exchange.pull()  # takes the same memory as after the update


class _WithoutValues(Exchange):
    def used_flags(self, flags: Tensor) -> list[bool]:
        return [True] * len(flags)
