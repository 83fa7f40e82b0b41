"""Trackio, Hugging Face's tracker: on this machine, or in a Space of the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from trainer.errors import UserError, missing, on_one_line
from trainer.loggers.base import Logger, pixels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trackio(Logger):
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
        try:
            import trackio
        except ImportError as error:
            raise missing("logger.trackio", "trackio", error) from error
        self._trackio = trackio
        init |= {"config": dict(settings), "resume": "allow" if first_step else "never", "embed": False}
        try:
            self._run = trackio.init(project, name=name or run_dir.resolve().name, **init)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"logger.trackio: {on_one_line(error)}") from error
        self.look = f"trackio show --project {project}"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(text)}, step=step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._run.log({name: self._trackio.Image(pixels_of(image))}, step=step)

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        figure.canvas.draw()
        pixels = figure.canvas.buffer_rgba()  # type: ignore[attr-defined]
        self._run.log({name: self._trackio.Image(np.asarray(pixels)[..., :3])}, step=step)

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        drawn = self._trackio.Histogram(np_histogram=(counts.numpy(), edges.numpy()))
        self._run.log({name: drawn}, step=step)

    def close(self) -> None:
        self._run.finish()
