"""A parameter server: some ranks hold the parameters and update them, others compute gradients."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.layout import bytes_by_server, lay_out, unpack
from trainer.comm.parameter_server.links import Link, Loopback, PeerLink
from trainer.comm.parameter_server.server import LayoutError, Mean, Server
from trainer.comm.timeline import Timeline
from trainer.comm.transport.blame import CommError, PeerError
from trainer.config import ParameterServerConfig
from trainer.distributed.agreement import compare_across_ranks, gather_objects
from trainer.distributed.process_group import Dist, broadcast_buffers, gloo_group
from trainer.errors import UserError, first_few
from trainer.optim.train_state import TrainState
from trainer.strategies.base import Computing, Fill, Strategy
from trainer.strategies.gradient_hooks import hooked_parameters, hooks_per_rank_note
from trainer.strategies.parameter_server.exchange_stats import ExchangeStats
from trainer.strategies.parameter_server.no_collectives import OF_WORKERS, NoCollectives
from trainer.strategies.parameter_server.roles import roles
from trainer.strategies.parameter_server.server_shards import (
    ServerShards,
    extra_states,
    named_alike,
    without_values,
)
from trainer.strategies.parameter_server.worker_copy import CHANGES, WorkerCopy
from trainer.strategies.shardable import refuse_max_norm, refuse_scripted, refuse_shared_memory

if TYPE_CHECKING:
    pass


class ParameterServer(Strategy):
    """Synchronous: in each step all workers pull, compute and push; the servers aggregate and update.

    A server keeps its shard and its optimizer state in host memory; the links between ranks use
    gloo, even if workers compute on GPUs. A rank that is only a server runs no forward pass in training:
    it gets buffers and extra state from the first worker; all else in a module stays as built there.
    """

    gradients_differ = True
    _of_timeline = staticmethod(Timeline.metrics)
    not_whole = "the servers hold the parameters"

    def __init__(
        self, settings: ParameterServerConfig, dist_: Dist, computing: Computing, timeout_s: float
    ) -> None:
        super().__init__(dist_.device, computing)
        self.settings, self.dist, self.timeout_s = settings, dist_, timeout_s
        self.servers, self.workers = roles(settings.servers, dist_.world_size)
        self.num_replicas = len(self.workers)
        self.serves, self.trains = dist_.rank in self.servers, dist_.rank in self.workers
        # A rank that is only a server has an unused number, so that it draws different random numbers.
        self.replica = self.workers.index(dist_.rank) if self.trains else self.num_replicas + dist_.rank
        self._mesh = DeviceMesh("cpu", self.servers)
        self.notes.append(
            f"parameter_server: {len(self.servers)} servers, {self.num_replicas} workers"
            + ("; every rank is both" if settings.servers == "all" else "")
        )
        self._pulled = False  # in this step
        self._compared = False  # the ranks' buffers, after the first step
        self._meets_nobody = settings.servers != "all"  # whether a worker's pass needs no other rank
        self._is_first_pass: bool | None = None  # of training; None before it
        self._copy: WorkerCopy | None = None
        self._server: Server | None = None

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        refuse_max_norm(model, "strategy=parameter_server")
        refuse_scripted(model, "strategy=parameter_server")
        refuse_shared_memory(model, "strategy=parameter_server")
        try:
            shapes = {name: without_values(parameter) for name, parameter in model.named_parameters()}
            self.buckets = lay_out(shapes, len(self.servers), int(self.settings.bucket_mb * 2**20))
        except ValueError as error:
            raise UserError(f"strategy=parameter_server: {error}") from error
        if (hooked := hooked_parameters(model)) and self.num_replicas > 1:
            self.notes.append(hooks_per_rank_note(hooked, "parameter_server"))
        self._shards = ServerShards(self._mesh, self.buckets, shapes)
        fill(model)
        for name, parameter in model.named_parameters():
            self._shards.take(name, parameter)
        model = super().wrap(model)
        own = self._shards.parameters
        self._model, self._parameters = model, dict(model.named_parameters())
        self.owned_model = named_alike(model, {p: own[name] for name, p in self._parameters.items()})
        self._connect(model)
        return model

    def _connect(self, model: nn.Module) -> None:
        rank = self.dist.rank
        self._group = gloo_group(self.timeout_s)
        workers = self._workers_group = gloo_group(self.timeout_s, self.workers)
        itself = Loopback(rank, self.timeout_s)

        def link(peer: int) -> Link:
            return itself if peer == rank else PeerLink(self._group, peer, self.timeout_s)

        if self.serves:
            links = {worker: link(worker) for worker in self.workers}
            self._server = Server(
                self.servers.index(rank), links, self.buckets, self._shards.values, self._shards.pack
            )
            self._mean = Mean(self._server)
            self._server.start(self._server.welcome)
        if self.trains:
            client = Client([link(server) for server in self.servers], self.buckets, self._parameters)
            client.greet()
            timeline = Timeline(workers)
            enter = self.dist.heartbeat.enter
            self._copy = WorkerCopy(model, client, self.buckets, timeline, self.computing.compile, enter)
        held = bytes_by_server(self.buckets)
        self._exchange_stats = ExchangeStats(self.servers, self.workers, held, self._copy, self._of_timeline)
        if self._server is not None:
            self._finish_serving()

    # ---- a step

    def begin_step(self) -> None:
        if self._server is not None:
            self._shards.pack()
            self._server.start(self._serve)

    def _serve(self, worker: int) -> None:
        assert self._server is not None
        self._server.send(worker)
        self._mean.add(self._server.receive(worker, 0, self._mean.arrived))

    @contextmanager
    def gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        assert self._copy is not None
        first, self._pulled = not self._pulled, True
        self._is_first_pass = self._is_first_pass is None
        self._before_forward()
        with self._plain_errors(), self._copy.pass_(first, last=enabled):
            yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        looks = self._is_first_pass and self._meets_nobody and not self.computing.compile
        with super().autocast(), NoCollectives(OF_WORKERS) if looks else nullcontext():
            yield

    def aggregate(self, model: nn.Module) -> None:
        self._pulled = False
        if self._server is not None:
            self._finish_serving()
            self._shards.set_gradients(self._mean.gradients, self._mean.there)
            self._mean.there.zero_()

    def is_to_blame(self) -> bool:
        own = (parameter.grad for parameter in self._parameters.values() if self.trains)
        return not all(bool(gradient.isfinite().all()) for gradient in own if gradient is not None)

    def update(self, state: TrainState, finite: bool = True) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None  # a worker's own gradient, of its data only
        super().update(state, finite)
        self._compare_once()

    def grad_norm(self, model: nn.Module) -> Tensor:
        norm = torch.zeros((), device=self.device)
        if self.serves:
            norm = super().grad_norm(self.owned_model).to(self.device)
        dist.broadcast(norm, src=self.servers[0])
        return norm

    # ---- state and metrics

    def owned(self, model: nn.Module) -> nn.Module:
        return self.owned_model

    def prepare(self, state: TrainState) -> None:
        averaged = state.average is not None and any(
            b.is_floating_point() for b in self.owned_model.buffers()
        )
        if averaged and not set(self.servers) <= set(self.workers):
            raise UserError(
                "ema.decay averages running statistics, too, but a rank that is only a server has none; use "
                "strategy.servers=all, or ema.decay=null"
            )
        if not self.serves:
            state.optimizer.state.clear()  # loaded from a checkpoint: the servers have it
        self._refresh()

    def _before_forward(self) -> None:
        """Give each worker the buffers of the first, as a save and a resume do (a collective of workers)."""
        if self.num_replicas > 1:
            broadcast_buffers(self._model, self.workers[0], self._workers_group)

    def sync_buffers(self, model: nn.Module) -> None:
        """Send every rank the servers' values, and the buffers of the first worker."""
        self._refresh()
        self.collect(model)

    def weights_changed(self, model: nn.Module) -> None:
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        for bucket, number, message in self._shards.broadcast(self.servers, self._group):
            unpack(bucket, number, message, self._parameters)
            if self._copy is not None:
                self._copy.client.keep(bucket.index, number, message)

    def collect(self, model: nn.Module) -> None:
        """Send every rank the buffers of the first worker, and servers its extra state, too."""
        self._compare_buffers()
        broadcast_buffers(self.owned_model, src=self.workers[0])
        if not (keepers := extra_states(model)):
            return
        states = [keeper.get_extra_state() for keeper in keepers]
        dist.broadcast_object_list(states, src=self.workers[0])
        if not self.trains:
            for keeper, state in zip(keepers, states, strict=True):
                keeper.set_extra_state(state)

    def _compare_once(self) -> None:
        """Called after each step (a collective in the first)."""
        if not self._compared:
            self._compare_buffers()
            self.finish_checks()
            self._compared = True

    def _compare_buffers(self) -> None:
        """Raise UserError on every rank if a forward pass created or resized buffers on some ranks only."""
        named = self.owned_model.named_buffers()
        mine = {f"the buffer {name}": f"{value.dtype} of {tuple(value.shape)}" for name, value in named}
        compare_across_ranks(
            mine,
            self.dist,
            "under strategy=parameter_server a rank that is only a server runs no forward pass in training: "
            "register buffers in __init__, in their final size, or use strategy=ddp",
        )

    def finish_checks(self) -> None:
        """Raise UserError on every rank if a pass made parameters, or changed any, on any worker."""
        own = [name for name, _ in self._model.named_parameters() if name not in self._parameters]
        if self._copy is not None:
            own += self._copy.changed()
        if names := sorted(set().union(*gather_objects(own))):
            raise UserError(CHANGES.format(first_few(names)))

    def eval_share(self, rank: int) -> tuple[int, int]:
        """All ranks evaluate, servers too, which would be idle otherwise."""
        return self.dist.world_size, rank

    def replica_groups(self) -> list[tuple[int, ...]]:
        return [tuple(self.workers)] if self.num_replicas > 1 else []

    def replicated(self, state: TrainState) -> Iterator[tuple[str, Tensor]]:
        """The workers' copies of the parameters, as last pulled."""
        yield from self._parameters.items()

    def metrics(self) -> dict[str, float]:
        return self._exchange_stats.metrics()

    def summary(self) -> str:
        """(A collective.)"""
        return self._exchange_stats.summary()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    # ---- errors

    def _finish_serving(self) -> None:
        assert self._server is not None
        with self._plain_errors():
            self._server.finish()

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            raise CommError(
                f"the exchange with the parameter servers stopped at rank {self.dist.rank}: {error}",
                error.peer,
            ) from error
        except LayoutError as error:
            raise RuntimeError(f"rank {self.dist.rank}: {error}; start all with the same model") from error
