"""The order of an asynchronous run's events: recorded in run_dir/arrivals, repeated by strategy.replay."""

from collections.abc import Sequence
from pathlib import Path

from trainer.comm.parameter_server import replay_file
from trainer.config import ParameterServerConfig
from trainer.errors import UserError, writing


class Replay:
    """Records rounds, and repeats those of `settings.replay`, if it is set.

    Attributes:
        repeats: whether it repeats a run.

    Raises:
        UserError: the file cannot be read, or is of a run with other servers, workers or settings.
    """

    def __init__(
        self,
        settings: ParameterServerConfig,
        servers: Sequence[int],
        workers: Sequence[int],
        run_dir: Path,
    ) -> None:
        self._file, self._run_dir = settings.replay, run_dir
        self._roles = {
            "servers": servers,
            "workers": workers,
            "max_staleness": settings.max_staleness,
            "bucket_mb": settings.bucket_mb,
        }
        self.repeats = settings.replay is not None
        self._rounds: dict[int, tuple[int, list[list[str]]]] = {}
        if settings.replay is not None:
            try:
                self._rounds = replay_file.read(Path(settings.replay), self._roles)
            except (OSError, ValueError) as error:
                raise UserError(f"strategy.replay={settings.replay} cannot be repeated: {error}") from error

    def events(self, first_step: int, steps: int) -> list[list[str]] | None:
        """Each server's events of the round of at most `steps` steps after `first_step`; None: it is new.

        Raises:
            UserError: the file has no such round; on all ranks.
        """
        if not self.repeats:
            return None
        made, events = self._rounds.get(first_step, (0, []))
        if not 0 < made <= steps:
            raise UserError(
                f"strategy.replay={self._file} has no round of {steps} steps after step {first_step}; "
                "repeat a run with its settings, train.log_every_steps and checkpoint.every_steps among them"
            )
        return events

    def record(self, first_step: int, steps: int, events: Sequence[Sequence[str]]) -> None:
        """Add a round to run_dir/arrivals. Called on rank 0. Raises UserError if it cannot be written."""
        with writing(self._run_dir):
            replay_file.append(self._run_dir / "arrivals", self._roles, first_step, steps, events)
