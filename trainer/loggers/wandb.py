"""The logger for Weights & Biases, online, or offline in run_dir/wandb for `wandb sync`."""

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.errors import UserError, on_one_line, optional
from trainer.loggers.base import Logger, pixels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Wandb(Logger):
    """A logger that writes a run and its resumes to the same W&B run, under one id.

    The x-axis of metrics is `step`, the optimizer step. W&B's own step counter never decreases, so steps that
    a resumed run repeats appear twice.

    Args:
        mode: online | offline | disabled | shared; None uses WANDB_MODE and the login.
        init: further arguments of `wandb.init`: project, entity, group, tags, ...

    Raises:
        UserError: wandb is not installed, the user is not logged in, or the service does not answer.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        first_step: int,
        settings: Mapping[str, Any],
        mode: str | None = None,
        name: str | None = None,
        **init: Any,
    ) -> None:
        wandb = optional("wandb", "logger.wandb")
        self._kinds = wandb
        offline = (mode or os.environ.get("WANDB_MODE")) == "offline"
        init |= {"id": run_id, "mode": mode, "resume": "allow" if first_step and not offline else None}
        init |= {"name": name or run_dir.resolve().name, "dir": run_dir, "config": dict(settings)}
        try:
            # train.log contains the output, and W&B would interfere with the progress bar.
            self._run = wandb.init(settings=wandb.Settings(console="off"), **init)
        except wandb.errors.Error as error:
            raise UserError(
                f"logger.wandb: {on_one_line(error)}; set logger.wandb.mode=offline to work without a network"
            ) from error
        self._run.define_metric("*", step_metric="step")
        self.look = self._run.url or f"wandb sync {Path(self._run.dir).parent}"

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({"step": step, **values})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(values, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._log({name: self._kinds.Html(f"<pre>{html.escape(text, quote=False)}</pre>")}, step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._log({name: self._kinds.Image(pixels_of(image))}, step)

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        self._log({name: self._kinds.Image(figure)}, step)

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        self._log({name: self._kinds.Histogram(np_histogram=(counts.numpy(), edges.numpy()))}, step)

    def close(self) -> None:
        self._run.finish()
