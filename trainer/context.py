"""The parts of a run, which `assemble` builds and the loop uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.config import Config
from trainer.data.device import ToDevice
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.loaders import EvalLoader, TrainLoader
from trainer.distributed.ranks import Ranks
from trainer.evaluation import ModelContext
from trainer.guards.buffers import BufferCheck
from trainer.guards.failure_snapshot import Snapshot
from trainer.guards.kept_buffers import KeptBuffers
from trainer.guards.replicas import ReplicaCheck
from trainer.guards.unsaved import UnsavedState
from trainer.guards.verification import Verification
from trainer.launch.signals import StopRequest
from trainer.loggers import RunLog
from trainer.report.meter import Meter
from trainer.report.profiler import Profile
from trainer.report.weight_statistics import WeightStatistics
from trainer.state.train_state import TrainState
from trainer.step_vote import AfterStep, StepVote
from trainer.strategies.base import Strategy
from trainer.tasks import Task


class RunData(NamedTuple):
    """This process's data loaders, its part of each batch, and the transfer to the device."""

    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: evaluation is disabled
    split: BatchSplit
    first_micro_batch: int  # index of this rank's first micro-batch among those of all replicas in a step
    to_device: ToDevice


class RunPlan(NamedTuple):
    """Facts that do not change after the run is built."""

    steps_before: int  # steps completed before this process started; 0 in a new run
    total_steps: int  # an upper limit, because a stream may end earlier
    num_parameters: int  # of the unsharded model
    exact: Mapping[str, Any] | None  # with train.exact: the facts that determine the bits, as in result.json
    log_interval: int | None  # steps; None: nothing is logged

    def logs(self, step: int) -> bool:
        return self.log_interval is not None and step % self.log_interval == 0


class Guards(NamedTuple):
    """Checks for wrong results, and copies of the state to use after a failure or a skipped step."""

    replicas: ReplicaCheck
    unsaved: UnsavedState
    buffers: BufferCheck
    verification: Verification
    snapshot: Snapshot  # a `FailureSnapshot` if the survivors of a failure save a checkpoint
    kept_buffers: KeptBuffers | None  # buffers after the last step, for the snapshot or a skipped step


class RunReport(NamedTuple):
    run_log: RunLog
    meter: Meter
    profile: Profile
    weight_statistics: WeightStatistics


@dataclass(frozen=True)
class Run:
    config: Config  # including values derived from the training data
    ranks: Ranks
    strategy: Strategy
    task: Task
    model: nn.Module  # wrapped by the strategy
    state: TrainState
    data: RunData
    plan: RunPlan
    checkpointer: Checkpointer
    vote: StepVote
    guards: Guards
    report: RunReport
    stop_request: StopRequest

    @property
    def seed(self) -> int:
        assert self.config.seed is not None
        return self.config.seed

    @property
    def model_context(self) -> ModelContext:
        """The parts that an evaluation needs."""
        parts = self.ranks, self.strategy, self.task, self.model
        return ModelContext(*parts, self.data.to_device, self.seed)

    def requested_action(self) -> AfterStep:
        """Return this rank's requested action. Only rank 0 checks the time, because clocks differ."""
        if self.stop_request.is_set:
            return AfterStep.STOP
        if not self.ranks.is_main:
            return AfterStep.CONTINUE
        if self.state.early_end.time_is_up():
            return AfterStep.END
        return AfterStep.SAVE if self.checkpointer.minutes_are_over() else AfterStep.CONTINUE
