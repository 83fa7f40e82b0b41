"""`train.profile`: trace some steps on each rank, for ui.perfetto.dev or chrome://tracing."""

import logging
import os
from pathlib import Path

from torch.profiler import ProfilerAction, profile, supported_activities

from trainer.config import ProfileConfig
from trainer.distributed.backend_flags import record_memory_history, write_memory_history
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, writing
from trainer.report.meter import Meter

log = logging.getLogger(__name__)


class Profile:
    """Records steps `start` to `start + steps - 1` to run_dir/profile; records nothing if `settings` is None.

    On CUDA, this also records the memory history, for https://docs.pytorch.org/memory_viz. The profiler
    starts one step early if possible, because its first step is slower than the others.
    """

    def __init__(
        self, settings: ProfileConfig | None, run_dir: Path, ranks: Ranks, steps_before: int, total_steps: int
    ) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._steps = range(0)
        self._profile: profile | None = None
        if settings is None:
            return
        begin, end = settings.start, settings.start + settings.steps
        if end - 1 > total_steps:
            raise UserError(
                f"train.profile asks for steps {begin} to {end - 1}, but the run ends after step "
                f"{total_steps}; lower train.profile.start or train.profile.steps, or train longer"
            )
        if begin <= steps_before:  # a restarted run must continue without a trace
            log.info(
                "train.profile: no trace, because it starts at step %d and this run resumes after step %d",
                *(begin, steps_before),
            )
            return
        self._begin = begin
        self._steps = range(max(begin - 1, steps_before + 1), end + 1)

    def before(self, step: int, meter: Meter) -> None:
        """Start or continue the recording before `step`, or write the trace; pause the meter meanwhile."""
        if step not in self._steps:
            return
        meter.pause()
        if self._profile is None:
            self._start(step)
        elif step < self._steps[-1]:
            self._profile.step()
        else:
            self._write()
        meter.start()

    def close(self) -> None:
        """Write the trace if the run ends with the recorded steps."""
        if self._profile is not None:
            self._write()

    def _start(self, step: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # otherwise Kineto logs, even about a missing GPU
        self._profile = profile(activities=supported_activities(), schedule=self._action, record_shapes=True)
        self._profile.step_num = step
        self._profile.start()
        record_memory_history(self._ranks.device)

    def _action(self, step: int) -> ProfilerAction:
        if step < self._begin:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if step == self._steps[-1] - 1 else ProfilerAction.RECORD

    def _write(self) -> None:
        assert self._profile is not None
        profiled, self._profile, self._steps = self._profile, None, range(0)
        folder, rank = self._run_dir / "profile", f"rank_{self._ranks.rank}"
        profiled.stop()
        with writing(self._run_dir):
            folder.mkdir(exist_ok=True)
            profiled.export_chrome_trace(str(folder / f"{rank}.json.gz"))
            write_memory_history(self._ranks.device, folder / f"{rank}.memory.pickle")
        log.info("profile: %s, for ui.perfetto.dev", folder)
