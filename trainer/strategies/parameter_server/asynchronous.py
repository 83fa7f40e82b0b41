"""A parameter server without common steps: stale-synchronous (max_staleness=K) or asynchronous (inf)."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.parameter_server.async_rounds import AsyncServer, AsyncWorker
from trainer.comm.parameter_server.order import Order, OutOfOrderError
from trainer.comm.timeline.records import Timeline
from trainer.config import ParameterServerConfig
from trainer.distributed.process_group import Dist
from trainer.errors import NonFiniteError, UserError
from trainer.local_shard import same_bits
from trainer.optim.train_state import Progress, TrainState
from trainer.step import StepResult, compute_gradients, label_counts_ahead
from trainer.strategies.base import Computing
from trainer.strategies.parameter_server.no_collectives import OF_OPTIMIZERS, NoCollectives
from trainer.strategies.parameter_server.replay import Replay
from trainer.strategies.parameter_server.staleness import StalenessStats
from trainer.strategies.parameter_server.synchronous import ParameterServer
from trainer.strategies.whole_scalars import whole_scalars
from trainer.tasks.label_counts import divisors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainer.data.loading.base import Batches
    from trainer.training.context import TrainingContext

log = logging.getLogger(__name__)


class AsyncParameterServer(ParameterServer):
    """Each push is a separate update, of gradients / workers; all ranks meet after a round of steps.

    A push's loss is the mean over its own counted labels, more or fewer than those of other pushes.
    A round lasts until the next step at which the loop logs, saves or evaluates.
    A push whose gradients are not finite is applied by no server, and ends the run once the pushes in flight
    have been applied; nothing of that round is saved.
    """

    _of_timeline = staticmethod(Timeline.means)  # no arrivals: workers' passes are independent

    def __init__(
        self,
        settings: ParameterServerConfig,
        dist_: Dist,
        computing: Computing,
        timeout_s: float,
        clip_grad_norm: float | None,
        run_dir: Path,
    ) -> None:
        super().__init__(settings, dist_, computing, timeout_s)
        self._max_norm = clip_grad_norm
        self._meets_nobody = True
        self._max_staleness = float(settings.max_staleness)
        self._replay = Replay(settings, self.servers, self.workers, run_dir)
        self._async_server: AsyncServer | None = None
        self._async_worker: AsyncWorker | None = None
        self._stops: Callable[[], bool] = lambda: False
        self._first_buffers: list[Tensor] | None = None  # copies from before the first forward pass
        self._warned = False  # that it changes them
        self._norms = [0.0, 0.0]  # sum and number of gradient norms since the last `_mean_norm`
        bound = (
            "without bound" if math.isinf(self._max_staleness) else f"at most {settings.max_staleness} ahead"
        )
        self.notes.append(
            f"parameter_server: asynchronous, a worker is {bound}; run_dir/arrivals records the order"
        )

    def _connect(self, model: nn.Module) -> None:
        super()._connect(model)
        if self._server is not None:
            self._async_server = AsyncServer(
                self._server, Order(self.timeout_s), self._max_staleness, self._apply
            )
        counts = self._async_server.staleness if self._async_server is not None else {}
        self._staleness = StalenessStats(self.servers[0], counts)
        if self._copy is not None:
            bounded = not math.isinf(self._max_staleness) and not self._replay.repeats
            client = self._copy.client
            waits = self.dist.heartbeat.ahead
            self._async_worker = AsyncWorker(client, self.num_replicas, bounded, lambda: self._stops(), waits)
            self._copy.before_push, self._copy.commit = self._async_worker.before_push, self._commit

    def prepare(self, state: TrainState) -> None:
        super().prepare(state)
        self._state, self._num_updates = state, 0

    def _before_forward(self) -> None:
        """Warn once: workers get the first one's buffers only where the loop saves or evaluates."""
        if self.num_replicas == 1 or self.replica != 0 or self._warned:
            return
        now = [buffer.detach() for buffer in self._model.buffers()]
        if self._first_buffers is None:
            self._first_buffers = [buffer.clone() for buffer in now]
        first = self._first_buffers
        self._warned = len(now) != len(first) or not all(map(same_bits, now, first))
        if self._warned:
            self._first_buffers = None
            log.warning(
                "the forward pass changes buffers, and each worker has its own until it gets the first "
                "one's at a save or an evaluation; if the forward pass also uses them, what is learned "
                "depends on when that is; use strategy.max_staleness=0, or strategy=ddp"
            )

    # ---- a round

    def train_step(self, context: "TrainingContext", batches: "Batches") -> StepResult:
        """Make a round: the steps up to the next after which all ranks meet, or fewer (a collective).

        Parameters change with each finished share of a step, in an order that is not known in advance.

        Raises:
            NonFiniteError: on all ranks; gradients that are not finite were not applied.
        """
        progress, heartbeat = context.state.progress, context.dist.heartbeat
        steps = steps_until_all_meet(context)
        last = heartbeat.step = progress.step + steps
        log_now = context.settings.logs(last)
        batches = context.train_loader.epoch(progress.epoch, progress.samples_in_epoch, self._assigned_shares)
        loss = torch.zeros((), device=self.device)
        context.checkpointer.wait_until_copied()
        if log_now:
            context.weight_statistics.before_update(last)
        with heartbeat.in_any_order():
            for step, replica in self._turns(steps, lambda: bool(context.asked())):
                heartbeat.enter("data")
                own = label_counts_ahead(context, batches)
                own_divisors = divisors(own, math.fsum(own))
                step += progress.step + 1
                loss += compute_gradients(context, batches, own_divisors, step, replica, tell_others=False)
            if not self.trains:
                heartbeat.skip(("data", "forward", "backward"), context.batch.accumulation)
        heartbeat.enter("optimizer")
        # No collective may wait for a round, which may be long: ranks that are done are ahead of the others.
        made = self._end_round()
        self._compare_once()
        context.agreement.start(loss, context.asked(), batches.data_left)
        agreed = context.agreement.finish(
            f"a step up to {last}",
            "servers had applied earlier pushes, and nothing was saved",
        )
        if agreed.not_finite is not None:
            raise agreed.not_finite
        grad_norm = self._mean_norm() if context.settings.clip_grad_norm is not None or log_now else None
        if not self.serves:
            for _ in range(made):
                context.state.step_schedule_and_average()
        if log_now:
            context.weight_statistics.after_update()
        for _ in range(made - 1):
            context.count_step(torch.zeros_like(loss), data_left=True)
        return StepResult(loss, grad_norm, agreed.after, leaves_a_step(context, progress))

    def _assigned_shares(self) -> Iterator[tuple[int, int]]:
        """The shares assigned to this worker, as (step of the round, replica)."""
        assert self._async_worker is not None
        while (share := self._async_worker.draw()) is not None:
            yield share

    def _turns(self, steps: int, stops: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Serve a round of at most `steps` steps; yields each share that this process computes."""
        self._stops, recorded = stops, self._replay.events(self._state.progress.step, steps)
        if self._async_server is not None:
            events = None if recorded is None else recorded[self.servers.index(self.dist.rank)]
            self._async_server.start(steps, events, stops)
        if self._async_worker is not None:
            self._async_worker.start()
            with self._plain_errors():
                while self._async_worker.has_share():
                    yield self._async_worker.share

    @contextmanager
    def gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        assert self._async_worker is not None
        if not self._pulled:
            with self._plain_errors():
                self._async_worker.before_pull()
        with super().gradient_sync(model, enabled):
            yield
        if enabled:
            self._pulled = False

    def _norm(self) -> Tensor:
        """The norm of this worker's own gradients."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def _commit(self) -> None:
        """End the worker's push; each push's gradient is clipped separately."""
        assert self._async_worker is not None
        if not self._norms[1]:  # the first since the last log
            self.refuse_no_gradients(self._model)
        norm = float(self._norm())
        clipped = 1.0 if self._max_norm is None else min(1.0, self._max_norm / (norm + 1e-6))
        self._norms = [self._norms[0] + norm, self._norms[1] + 1]
        self._async_worker.after_push(clipped / self.num_replicas if math.isfinite(norm) else math.nan)
        for parameter in self._parameters.values():
            parameter.grad = None

    def _apply(self, gradients: dict[int, Tensor], there: Tensor) -> None:
        """Update the server's parameters, in the thread that received the push."""
        self._shards.set_gradients(gradients, there)
        looks, optimizer = not self._num_updates and len(self.servers) > 1, self._state.optimizer
        with NoCollectives(OF_OPTIMIZERS) if looks else nullcontext(), whole_scalars(optimizer, looks):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._num_updates += 1
        if self._num_updates % self.num_replicas == 0:
            self._state.step_schedule_and_average()

    def _end_round(self) -> int:
        """Wait for the end of the round; return how many steps it made (a collective)."""
        mine = None
        if self._async_server is not None:
            with self._plain_errors():
                mine = (
                    self._async_server.finish(),
                    self._async_server.order.events,
                    self._async_server.not_finite,
                    self._async_server.refused,
                )
        everyones: list[Any] = [None] * self.dist.world_size
        dist.all_gather_object(everyones, mine)
        told = [everyones[server] for server in self.servers]
        made: int = told[0][0]
        if words := next((words for *_, words in told if words is not None), None):
            raise UserError(words)
        if (bad := next((rank for _, _, rank, _ in told if rank is not None), None)) is not None:
            raise self._refused(bad)
        if self.dist.is_main:
            self._replay.record(self._state.progress.step, made, [own for _, own, *_ in told])
        return made

    def _refused(self, rank: int) -> NonFiniteError:
        return NonFiniteError(
            f"the norm of the gradients of {self.dist.describe(rank)} is NaN or Inf; no server applied them. "
            "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank",
            ranks=(rank,),
        )

    def _mean_norm(self) -> Tensor:
        """The mean norm of the gradients since the last call, each clipped separately (a collective)."""
        norms = torch.tensor(self._norms, device=self.device)
        self._norms = [0.0, 0.0]
        dist.all_reduce(norms)
        return norms[0] / norms[1]

    # ---- state and metrics

    def replica_groups(self) -> list[tuple[int, ...]]:
        return []

    def measured(self) -> dict[str, Any]:
        busy_s = self._async_server.busy_s if self._async_server is not None else 0.0
        return self._exchange_stats.measured(self.settings.servers, self.dist.device.type, busy_s)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self._staleness.metrics()

    def plots(self) -> dict[str, "Figure"]:
        return super().plots() | self._staleness.plots()

    def summary(self) -> str:
        return f"{super().summary()}\n{self._staleness.table()}"

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            with super()._plain_errors():
                yield
        except OutOfOrderError as error:
            raise RuntimeError(f"rank {self.dist.rank} has stopped serving: {error}") from error


def steps_until_all_meet(context: "TrainingContext") -> int:
    """The number of steps until the loop logs, saves or evaluates, or the epoch or the run ends."""
    now, ahead = context.state.progress, dataclasses.replace(context.state.progress)
    while True:
        ahead.advance(context.settings.global_batch_size, leaves_a_step(context, ahead))
        meets = context.settings.logs(ahead.step) or ahead.step == context.total_steps
        every = context.settings.eval_every_steps
        meets = meets or (every is not None and ahead.step % every == 0)
        if meets or ahead.epoch != now.epoch or context.checkpointer.due(ahead, end_of_epoch=False):
            return ahead.step - now.step


def leaves_a_step(context: "TrainingContext", progress: Progress) -> bool:
    assert context.train_loader.num_samples is not None, "a stream assigns no shares"
    return progress.leaves_a_step(context.settings.global_batch_size, context.train_loader.num_samples)
