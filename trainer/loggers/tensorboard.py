"""TensorBoard: the training curves first, then speed, memory and communication."""

import re
import shlex
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trainer.loggers.base import Logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# TensorBoard sorts groups by name, so numbers order them.
_GROUPS = {"eval": "2_eval", "train": "3_train", "speed": "4_speed", "memory": "5_memory", "comm": "6_comm"}
_LOSS = {"train": "1_loss/train", "eval": "1_loss/eval", "objective": "1_loss/train_objective"}
_LOSS |= {"average": "1_loss/eval_ema"}


class TensorBoard(Logger):
    """Events under ``run_dir/tensorboard``, flushed at every log step: a killed run loses only later ones.

    ``1_loss`` holds ``eval/loss`` and ``train/loss``. If the task sets ``plain_loss`` (with label smoothing),
    that is ``1_loss/train``, and the loss that training minimises is ``1_loss/train_objective``.
    """

    def __init__(self, run_dir: Path, first_step: int, **told: Any) -> None:
        self._run_dir, self._first_step = run_dir, first_step
        self.look = f"tensorboard {_logdir(run_dir)}"

    @cached_property
    def _writer(self) -> SummaryWriter:
        """Created at the first use: until then the run may be refused, and leaves no file."""
        # A resumed run writes some steps again, all of them if it died before its first save;
        # purge_step hides those of the earlier process.
        writer = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=self._first_step + 1)
        together = ["Multiline", [f"^{_LOSS['train']}$", f"^{_LOSS['eval']}$"]]
        writer.add_custom_scalars({"learning": {"loss of training and evaluation": together}})
        return writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(tag(name, values), value, step)
        self._writer.flush()

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(tag(name), text, step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._writer.add_image(tag(name), image, step)

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        self._writer.add_figure(tag(name), figure, step)

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        middles = (edges[:-1] + edges[1:]) / 2
        self._writer.add_histogram_raw(
            tag(name),
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


def _logdir(run_dir: Path) -> str:
    """The option with which TensorBoard shows the run's name; with --logdir alone it shows `.`"""
    events, name = run_dir / "tensorboard", run_dir.resolve().name
    return (
        f"--logdir {shlex.quote(str(events))}"
        if re.search(r"[,:\s]", f"{events}{name}")
        else f"--logdir_spec {name}:{events}"
    )


def tag(name: str, beside: Collection[str] = ()) -> str:
    """The tag of `name` on TensorBoard's page, given the metrics logged `beside` it."""
    if name in ("eval/loss", "eval/ema/loss"):
        return _LOSS["eval" if name == "eval/loss" else "average"]
    if name == "train/plain_loss" or (name == "train/loss" and "train/plain_loss" not in beside):
        return _LOSS["train"]
    if name == "train/loss":
        return _LOSS["objective"]
    group, _, rest = name.partition("/")
    return f"{_GROUPS[group]}/{rest}" if group in _GROUPS else name
