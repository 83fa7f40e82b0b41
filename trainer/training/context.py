"""The parts of a run: created by `run`, used by the loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checks.buffers import BufferCheck
from trainer.checks.replicas import ReplicaCheck
from trainer.checks.unsaved import UnsavedState
from trainer.config import Config, EmaConfig, TrainConfig
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.loaders import EvalLoader, TrainLoader
from trainer.inference.evaluation import ModelContext
from trainer.launch.signals import StopRequest
from trainer.loggers import RunLog
from trainer.optim.train_state import TrainState
from trainer.training.failure_snapshot import NoSnapshot
from trainer.training.kept_buffers import KeptBuffers
from trainer.training.meter import Meter
from trainer.training.profiler import Profile
from trainer.training.step_agreement import AfterStep, StepAgreement
from trainer.training.weight_statistics import WeightStatistics


class Checks(NamedTuple):
    """What looks for wrong results while a run trains."""

    replicas: ReplicaCheck
    unsaved: UnsavedState
    buffers: BufferCheck


@dataclass(frozen=True)
class Run(ModelContext):
    """All of one process's parts of a run."""

    settings: TrainConfig
    as_built: Config  # all settings, with what was taken from the training data
    ema: EmaConfig
    state: TrainState  # of the module that the strategy owns
    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: never evaluate
    split: BatchSplit
    first_micro_batch: int  # of this rank: its number within a step, over all replicas
    num_parameters: int  # of the whole model
    steps_before: int  # made before this process began; 0 in a new run
    total_steps: int  # an upper limit: a stream may end before
    exact: Mapping[str, Any] | None  # of an exact run: what decides its bits, as in result.json
    checkpointer: Checkpointer
    run_log: RunLog
    weight_statistics: WeightStatistics
    agreement: StepAgreement
    checks: Checks
    meter: Meter
    profile: Profile
    stop_request: StopRequest
    snapshot: NoSnapshot  # a `FailureSnapshot`, if a survivor of a failure may save
    kept_buffers: KeptBuffers | None  # after the last step, for the snapshot or a step that is skipped

    def asked(self) -> AfterStep:
        """What this rank asks of all after the step; of the time only rank 0, since clocks differ."""
        if self.stop_request.is_set:
            return AfterStep.STOP
        if not self.ranks.is_main:
            return AfterStep.CONTINUE
        if self.state.early_end.time_is_up():
            return AfterStep.END
        return AfterStep.SAVE if self.checkpointer.minutes_are_over() else AfterStep.CONTINUE
