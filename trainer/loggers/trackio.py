"""Trackio, Hugging Face's tracker: on this machine, or in a Space of the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import UserError, on_one_line, optional
from trainer.loggers.wandb import Wandb

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trackio(Wandb):  # with W&B's calls
    """One run of Trackio for each run, also when it is resumed: it goes on under the same name.

    Args:
        project: its name.
        name: None: the name of run_dir.
        init: further arguments of `trackio.init`: space_id, group, ...

    Raises:
        UserError: trackio is not installed, or a Space does not answer.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        first_step: int,
        settings: Mapping[str, Any],
        project: str = "ringmaster",
        name: str | None = None,
        **init: Any,
    ) -> None:
        trackio = optional("trackio", "logger.trackio")
        self._kinds = trackio
        init |= {"config": dict(settings), "resume": "allow" if first_step else "never", "embed": False}
        try:
            self._run = trackio.init(project, name=name or run_dir.resolve().name, **init)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"logger.trackio: {on_one_line(error)}") from error
        self.look = f"trackio show --project {project}"

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._log({name: self._kinds.Markdown(text)}, step)

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        figure.canvas.draw()
        pixels = figure.canvas.buffer_rgba()  # type: ignore[attr-defined]
        self._log({name: self._kinds.Image(np.asarray(pixels)[..., :3])}, step)
