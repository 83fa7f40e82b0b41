"""The logger for TensorBoard."""

import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trainer.loggers.base import Logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TensorBoard(Logger):
    """Writes event files in run_dir, under the names of metrics.jsonl.

    They are flushed at every log step, so a killed run loses only later metrics. A curve appears
    once it has a value other than zero.
    """

    def __init__(self, run_dir: Path, first_step: int, **_: Any) -> None:
        self._run_dir, self._first_step = run_dir, first_step
        self._shown = set[str]()
        self._last_zero: dict[str, int] = {}  # the step, by the name of a curve that is not shown yet
        # TensorBoard names a run by its path below this folder.
        folder = run_dir.parent if run_dir.name else run_dir.resolve().parent
        self.look = f"tensorboard --logdir {shlex.quote(str(folder))}"

    @cached_property
    def _writer(self) -> SummaryWriter:
        """Created at the first use, because an error before the first step must leave no file."""
        # A resumed run repeats the steps after the last save; purge_step hides those of the previous process.
        writer = SummaryWriter(str(self._run_dir), purge_step=self._first_step + 1)
        together = ["Multiline", ["^train/(plain_)?loss$", "^eval/loss$"]]
        writer.add_custom_scalars({"loss": {"training and validation": together}})
        return writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            if value == 0 and name not in self._shown:
                self._last_zero[name] = step
                continue
            if name in self._last_zero:
                self._writer.add_scalar(name, 0.0, self._last_zero.pop(name))
            self._shown.add(name)
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._writer.add_image(name, image, step)

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        # Not add_figure, which drops the transparency that makes a plot readable in light and in dark.
        self._writer.add_image(name, np.asarray(canvas.buffer_rgba()), step, dataformats="HWC")

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        middles = (edges[:-1] + edges[1:]) / 2
        self._writer.add_histogram_raw(
            name,
            min=edges[0].item(),
            max=edges[-1].item(),
            num=counts.sum().item(),
            sum=(counts * middles).sum().item(),
            sum_squares=(counts * middles**2).sum().item(),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def close(self) -> None:
        self._writer.close()
