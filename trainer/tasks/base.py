"""The interface of tasks: any class with `loss`, and the other methods as needed."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from trainer.errors import UserError
from trainer.tensors.nested import leaves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, equal on every rank except `rows`."""

    metrics: dict[str, float]
    sums: Tensor | None  # sum of eval_sums over all samples, float64 on the model's device
    rows: dict[str, Tensor] | None  # of all samples in the dataset's order; only on rank 0's CPU
    batch: Any  # this rank's first held-out batch, on its device


@dataclass(frozen=True)
class Shown:
    """Texts, images and matplotlib figures of an evaluation, by their names in TensorBoard."""

    texts: Mapping[str, str] = field(default_factory=dict)  # Markdown
    images: Mapping[str, Tensor] = field(default_factory=dict)  # (3 or 1, H, W), uint8 or floats in [0, 1]
    figures: Mapping[str, Callable[[], "Figure"]] = field(default_factory=dict)  # drawn on rank 0 only


class Task(Protocol):
    """`loss`, and for evaluation sums, rows, or both; without `train.eval_every_epochs`, neither.

    Sums are what ranks can add: means, accuracies. They weight uneven last batches correctly. Rows are
    for metrics that are not sums, such as AUC, F1 or retrieval: some numbers for each sample, gathered
    on rank 0, each sample once and in the dataset's order, at any world size. Subclassing is not needed.

    A task may have an attribute ``metric_names``, of all metrics that it reports: with it a
    ``checkpoint.keep_best.metric`` that no evaluation yields raises an error before training. If it minimises
    another loss than evaluation computes, ``loss`` may store the latter for its batch, detached, in the
    attribute ``plain_loss``: it is logged to compare with ``eval/loss``.
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]:
        """Mean over the counted labels of the micro-batch, a scalar to differentiate.

        Without counted labels it may be NaN; its gradient by the model's outputs then counts as 0. With it
        may come its parts, scalars by name, such as {"box": ..., "class": ...}: the log has their means, with
        the weights of the loss, as train/box and train/class.
        """

    def begin_step(self, step: int, last_step: int, model: nn.Module) -> None:
        """Called before the first micro-batch of each optimizer step, on every rank, also after a resume.

        For what depends on the step: whose turn it is, a decaying rate, which parameters are trained.
        Set attributes, or call `requires_grad_` on the model's parameters; a checkpoint needs neither. The
        dry run also calls it, for the step that follows.

        Args:
            step: counted from 1.
            last_step: of the whole run, unless its data or `train.early_stopping` end it before.
            model: unwrapped; a method without this parameter is called without it. Under fsdp its parameters
                are sharded.
        """

    def end_step(self, model: nn.Module, step: int) -> None:
        """Called after the update of each step, on every rank: for a teacher that follows its student.

        Runs without gradients. Not called for a step without an update, which `train.skip_nonfinite` or an
        overflow in fp16 skips.

        Args:
            model: unwrapped, without gradients. Under fsdp its parameters are sharded: treat them element by
                element, as in `teacher.lerp_(student, 0.01)`, with parameters of the same shape.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """The number of counted labels of the micro-batch, or the sum of their weights: `loss`'s divisor.

        Called once for each training batch, while it is still on the host. A step divides by the sum over
        all ranks and micro-batches: its loss is the mean over all counted labels, and 0 without any.
        Without this method each sample counts the same: `data.collate` may leave samples out, or make several
        of one. The first dimension of a batch's tensors tells how many there are; where they differ, this
        method is required.
        """

    def compile(self) -> None:
        """Compile what `loss` computes outside the model; called once, with train.compile=true."""

    def num_tokens(self, batch: Any) -> int | Tensor:
        """The number of counted tokens, for speed/tokens_per_second; may be a tensor."""

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """float64 sums over the batch, of the same length for every batch, on the model's device."""

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Metrics from the sums over all samples of all ranks; runs are compared by ``loss``."""

    def rows(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Tensors (B, ...) by name, a row for each sample, of one shape and dtype in all batches."""

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        """Metrics from the rows of all samples; called on rank 0 only, with tensors on the CPU."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Tensors (B, ...) by name, a row for each sample: the columns of `python -m trainer.predict`."""

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        """What to show of the model, called at times after an evaluation.

        Called on every rank, since a forward pass may need all of them, so each must make the same number;
        what rank 0 returns is logged. Random numbers drawn here do not affect those of training.
        """


def offers(task: Task, *methods: str) -> bool:
    """Whether the task has all these methods."""
    return all(callable(getattr(task, name, None)) for name in methods)


def refuse_own_parameters(task: Task, known: Collection[int] = ()) -> None:
    """Raise UserError if `task` holds parameters that require a gradient, but those with `known` ids."""
    for part in leaves(getattr(task, "__dict__", {})):
        for tensor in part.parameters() if isinstance(part, nn.Module) else [part]:
            is_tensor = isinstance(tensor, Tensor) and id(tensor) not in known
            if is_tensor and tensor.requires_grad and tensor.is_leaf:  # outputs that a loss keeps are none
                raise UserError(
                    f"data.task: {type(task).__name__} has parameters, which no optimizer would train and "
                    "no checkpoint hold; put them into the model, or freeze them (requires_grad_(False))"
                )


def call_begin_step(task: Any, step: int, last_step: int, model: nn.Module) -> None:
    """Call the task's `begin_step`, with the model if it has that parameter."""
    takes_model = _takes_model(getattr(task.begin_step, "__func__", task.begin_step))
    task.begin_step(step, last_step, **({"model": model} if takes_model else {}))


@functools.cache
def _takes_model(begin_step: Callable[..., None]) -> bool:
    return "model" in inspect.signature(begin_step).parameters
