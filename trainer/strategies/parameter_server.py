"""Parameter server: workers compute gradients; servers add them, update the parameters and send them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.parameter_server import Exchange
from trainer.config import ParameterServerConfig
from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import broadcast_buffers, broadcast_tensors, gloo_group
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.model.plain_names import modules_with_extra_state, parameter_names
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.combined import has_user_part
from trainer.state.train_state import TrainState
from trainer.strategies.base import ComputeOptions, Fill, Report, Strategy
from trainer.strategies.placement import refuse_several_devices
from trainer.tensors.nested import mapped


class ParameterServer(Strategy):
    """A synchronous parameter server: in each step, workers push gradients and all ranks pull new values.

    Every rank has the whole model, and an optimizer with all parameters, so that groups, learning rates and
    names are the same as under other strategies. The optimizer gets gradients, and so has state, only for the
    parameters that its rank owns. A rank that is only a server gets no micro-batches.
    """

    name = "parameter_server"
    gradients_differ = True
    incomplete_reason = "each server has only the optimizer state of its own parameters"

    def __init__(
        self, settings: ParameterServerConfig, ranks: Ranks, compute: ComputeOptions, timeout_s: float
    ) -> None:
        super().__init__(ranks.device, compute)
        self.settings, self.ranks, self.timeout_s = settings, ranks, timeout_s
        self.servers, self.workers = roles(settings.servers, ranks.world_size)
        self.num_replicas = len(self.workers)
        # Servers are numbered after the workers: they get no part of the batch, and other random numbers.
        self.replica = [*self.workers, *self.servers].index(ranks.rank)

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        refuse_several_devices(model, "strategy=parameter_server")
        model = super().wrap(model, fill)
        broadcast_tensors([*model.parameters(), *model.buffers()], src=0)
        self.exchange = self.connect(list(model.parameters()))
        self.report = TrafficReport(self.exchange, self.servers, self.workers)
        busiest = max(map(self.exchange.bytes_of, self.servers))
        self.notes.append(
            f"parameter_server: {len(self.servers)} servers, {self.num_replicas} workers"
            + ("; every rank is both" if self.settings.servers == "all" else "")
            + f"; a server receives and sends up to {busiest / 1e6:.3g} MB per step"
        )
        return model

    def follow_trainable(self, model: nn.Module) -> bool:
        self.exchange.follow_trainable()
        return super().follow_trainable(model)

    def connect(self, parameters: list[nn.Parameter]) -> Exchange:
        """Return the exchange of gradients and values (a collective). planner/simulated.py overrides it."""
        self._group = gloo_group(self.timeout_s)  # NCCL does not support CPU tensors
        bucket_bytes = int(self.settings.bucket_mb * 2**20)
        return Exchange(parameters, self.servers, self.workers, self.ranks.rank, self._group, bucket_bytes)

    def prepare(self, state: TrainState) -> None:
        """Drop the optimizer state of other ranks' parameters, which a resume loads on every rank."""
        self.exchange.reset_counters()
        own = set(self.exchange.owned.get(self.ranks.rank, ()))
        for parameter in [p for p in state.optimizer.state if isinstance(p, Tensor) and p not in own]:
            del state.optimizer.state[parameter]
        if len(self.servers) > 1 and has_user_part(state.optimizer):
            self.notes.append("parameter_server: a server's optimizer updates only the server's parameters")

    def share_buffers(self, model: nn.Module) -> None:
        broadcast_buffers(model, self.workers[0])  # servers make no forward pass

    def aggregate(self, model: nn.Module) -> None:
        self.exchange.push()

    def grad_norm(self, trainable: TrainableParameters) -> Tensor:
        # On a rank that owns no parameters, the norm may have another dtype, so all ranks add in float64.
        square = super().grad_norm(trainable).to(self.device, torch.float64) ** 2
        dist.all_reduce(square)
        return square.sqrt()

    def share_updates(self) -> None:
        self.exchange.pull()

    @contextmanager
    def gathered(self, state: TrainState) -> Iterator[None]:
        """Within the context, give rank 0 the optimizer state of all servers and a worker's extra state."""
        optimizer_state, borrowed = state.optimizer.state, list[Tensor]()
        for server, parameters in self.exchange.owned.items():
            received = self._to_main(server, [optimizer_state.get(parameter) for parameter in parameters])
            for parameter, value in zip(parameters, received, strict=False):
                if value is not None:
                    optimizer_state[parameter] = value
                    borrowed.append(parameter)
        keepers = modules_with_extra_state(state.model).values()
        states = self._to_main(self.workers[0], [keeper.get_extra_state() for keeper in keepers])
        for keeper, extra in zip(keepers, states, strict=False):
            keeper.set_extra_state(extra)
        yield
        for key in borrowed:
            del optimizer_state[key]

    def _to_main(self, src: int, values: list[Any]) -> list[Any]:
        """Return the `values` of rank `src` on rank 0, [] on other ranks; all ranks pass the same number."""
        box: list[Any] = [[]]
        if values and self.ranks.rank == src != 0:
            on_host = mapped(values, lambda value: value.cpu() if isinstance(value, Tensor) else value)
            dist.send_object_list([on_host], 0, self._group)
        elif values and self.ranks.is_main and src != 0:
            dist.recv_object_list(box, src, self._group)
        return box[0]

    def replica_groups(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.ranks.world_size))]

    def replicated(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        return parameter_names(state.model)  # the optimizer state differs between servers


class TrafficReport(Report):
    """Measures per step, on average, each server's traffic in MB and each worker's waiting time in ms."""

    def __init__(self, exchange: Exchange, servers: Sequence[int], workers: Sequence[int]) -> None:
        self.exchange, self._servers, self._workers = exchange, servers, workers
        self._counted = (0, 0, 0.0)  # steps, bytes and seconds up to the last call of `metrics`

    def metrics(self) -> dict[str, float]:
        exchange, before = self.exchange, self._counted
        self._counted = (exchange.steps, exchange.moved, exchange.waited_s)
        own = [now - then for now, then in zip(self._counted, before, strict=True)]
        means = [(moved / max(1, n), waited_s / max(1, n)) for n, moved, waited_s in gather_objects(own)]
        moved = {f"usage/ps/megabytes/server_{server}": means[server][0] / 1e6 for server in self._servers}
        return moved | {
            f"usage/ps/waited_ms/worker_{worker}": 1e3 * means[worker][1] for worker in self._workers
        }

    def summary(self) -> str:
        self._counted = (0, 0, 0.0)
        return "\n".join(f"{name}  {value:.4g} per step" for name, value in self.metrics().items())


def roles(servers: str, world_size: int) -> tuple[list[int], list[int]]:
    """Return the ranks of the servers and of the workers.

    The first `servers` ranks are servers and the others are workers; with "all", every rank is both.
    """
    ranks, count = list(range(world_size)), 1 if servers == "all" else int(servers)
    if count >= world_size:
        raise UserError(
            f"strategy.servers={servers} leaves no rank as a worker, because this run has {world_size} "
            f"rank(s); start {count + 1} or more (torchrun --nproc_per_node={count + 1}), set fewer servers, "
            "or use strategy=single"
        )
    return (ranks, ranks) if servers == "all" else (ranks[:count], ranks[count:])
