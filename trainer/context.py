"""The parts of a run: built by `assemble`, used by the loop."""

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
    """The data of this process, and how it reaches the model."""

    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: never evaluate
    split: BatchSplit
    first_micro_batch: int  # of this rank: its number within a step, over all replicas
    to_device: ToDevice


class RunPlan(NamedTuple):
    """Numbers that are fixed once the run is built."""

    steps_before: int  # made before this process began; 0 in a new run
    total_steps: int  # an upper limit: a stream may end before
    num_parameters: int  # of the whole model
    exact: Mapping[str, Any] | None  # of an exact run: what decides its bits, as in result.json
    log_interval: int | None  # steps; None: nothing is logged

    def logs(self, step: int) -> bool:
        """Return whether `step` is a log step."""
        return self.log_interval is not None and step % self.log_interval == 0


class Guards(NamedTuple):
    """Checks for wrong results, and copies for a failure or a skipped step."""

    replicas: ReplicaCheck
    unsaved: UnsavedState
    buffers: BufferCheck
    snapshot: Snapshot  # a `FailureSnapshot`, if a survivor of a failure may save
    kept_buffers: KeptBuffers | None  # after the last step, for the snapshot or a step that is skipped


class RunReport(NamedTuple):
    """The meters and loggers of a run."""

    run_log: RunLog
    meter: Meter
    profile: Profile
    weight_statistics: WeightStatistics


@dataclass(frozen=True)
class Run:
    """All of one process's parts of a run."""

    config: Config  # with what was taken from the training data
    ranks: Ranks
    strategy: Strategy
    task: Task
    model: nn.Module  # wrapped by the strategy
    state: TrainState  # of the module that the strategy owns
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
        """What an evaluation needs."""
        parts = self.ranks, self.strategy, self.task, self.model
        return ModelContext(*parts, self.data.to_device, self.seed)

    def asked(self) -> AfterStep:
        """What this rank asks of all after the step; of the time only rank 0, since clocks differ."""
        if self.stop_request.is_set:
            return AfterStep.STOP
        if not self.ranks.is_main:
            return AfterStep.CONTINUE
        if self.state.early_end.time_is_up():
            return AfterStep.END
        return AfterStep.SAVE if self.checkpointer.minutes_are_over() else AfterStep.CONTINUE
