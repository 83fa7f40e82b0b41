"""The parts of a run: what `run` puts together and the loop works with."""

from dataclasses import dataclass

from torch import Tensor

from trainer.checkpoint import Checkpointer
from trainer.config import EmaConfig, TrainConfig
from trainer.data.batch import BatchSplit
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.evaluation import Forward
from trainer.gradients import GradientCheck
from trainer.guard import StepGuard
from trainer.learning import Learning
from trainer.loggers import RunLog
from trainer.metrics import Meter
from trainer.profiling import Profile
from trainer.replicas import ReplicaGuard
from trainer.signals import StopRequest
from trainer.state import TrainState


@dataclass(frozen=True)
class Job(Forward):
    """All of one process's parts of a run."""

    settings: TrainConfig
    ema: EmaConfig
    state: TrainState  # of what the strategy says is owned of `model`
    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: never evaluate
    batch: BatchSplit
    first_step: int  # where a resumed run goes on
    total_steps: int  # at most: a stream may end train.epochs before
    checkpointer: Checkpointer
    replicas: ReplicaGuard
    run_log: RunLog
    learning: Learning
    guard: StepGuard
    gradients: GradientCheck
    meter: Meter
    profile: Profile
    stop_request: StopRequest

    def count_step(self, loss: Tensor, data_left: bool) -> None:
        """Count a step that was made, with this rank's `loss`; without `data_left` the epoch ends with it."""
        self.state.progress.advance(self.settings.global_batch_size, data_left)
        self.meter.count_step(loss)
        self.run_log.advance()
