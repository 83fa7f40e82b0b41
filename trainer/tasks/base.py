"""The interface of tasks: classes with `loss` and optional further methods."""

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
    """The results of an evaluation, which are equal on all ranks except `rows` and `batch`."""

    metrics: dict[str, float]
    sums: Tensor | None  # sum of eval_sums over all samples, float64 on the model's device
    rows: dict[str, Tensor] | None  # all samples in the dataset's order; rank 0 only, on the CPU
    batch: Any  # this rank's first validation batch, on its device


@dataclass(frozen=True)
class Shown:
    """Texts, images and matplotlib figures to show in TensorBoard, by name."""

    texts: Mapping[str, str] = field(default_factory=dict)  # Markdown
    images: Mapping[str, Tensor] = field(default_factory=dict)  # (3 or 1, H, W), uint8 or floats in [0, 1]
    figures: Mapping[str, Callable[[], "Figure"]] = field(default_factory=dict)  # drawn on rank 0 only


class Task(Protocol):
    """The loss and the metrics of a run. Subclassing is not needed.

    ``loss`` is required. To evaluate, a task also needs ``eval_sums`` and ``summarise``, ``rows`` and
    ``summarise_rows``, or all four; with ``train.eval_every_epochs=0`` it needs neither pair.

    Sums are for metrics that can be added over ranks, such as means and accuracies. Rows are for metrics that
    are not sums, such as AUC, F1 or retrieval: a few numbers per sample, gathered on rank 0 in the dataset's
    order.

    If the attribute ``metric_names`` lists all metrics of a task, a ``checkpoint.keep_best.metric`` that does
    not exist raises an error before training. If evaluation computes a different loss than training, ``loss``
    may also compute the evaluation loss for its batch, and store it, detached, in the attribute
    ``plain_loss``, which is logged for comparison with ``eval/loss``.
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]:
        """Return the mean loss over the micro-batch's counted labels (those not ignored), as a scalar.

        Without counted labels the loss may be NaN; its gradient is then set to 0. The method may also return
        a tuple of the loss and its parts, scalars by name, such as {"box": ..., "class": ...}. Their means,
        weighted like the loss, are logged as train/box and train/class.
        """

    def begin_step(self, step: int, last_step: int, model: nn.Module) -> None:
        """Called before the first micro-batch of each optimizer step, on every rank.

        Use this method for whatever depends on the step: alternating networks, a decaying rate, which
        parameters are trained. Set attributes of the task, or call `requires_grad_` on the model's
        parameters; neither needs to be in a checkpoint. The dry run also calls it, with the number of the
        next step.

        Args:
            step: number of the step, counted from 1.
            last_step: number of the last step, unless the data or `train.early_stopping` end the run earlier.
            model: the unwrapped model; under fsdp, its parameters are sharded. The method may omit this
                argument.
        """

    def end_step(self, model: nn.Module, step: int) -> None:
        """Called after the update of each step, on every rank, for example to update a teacher network.

        Gradients are disabled. The method is not called if the update is skipped because of
        `train.skip_nonfinite` or an overflow in fp16.

        Args:
            model: the unwrapped model. Under fsdp its parameters are sharded: use elementwise operations,
                such as `teacher.lerp_(student, 0.01)` with parameters of the same shape.
            step: number of the step, counted from 1.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """Return the number of counted labels of the micro-batch, or the sum of their weights.

        This is the number by which `loss` divides. The method is called once for each training batch, while
        the batch is still in CPU memory. The loss of a step is the mean over the counted labels of all ranks
        and micro-batches, and 0 if there are none.

        Without this method, each sample counts the same. The first dimension of the batch's tensors is then
        the number of samples, and must be the same for all tensors.
        """

    def compile(self) -> None:
        """Compile what `loss` computes outside the model; called once if `train.compile=true`."""

    def num_tokens(self, batch: Any) -> int | Tensor:
        """Return the number of tokens that count in the loss, for usage/tokens_per_second."""

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Return sums over the batch, float64, on the model's device, of the same length for every batch.

        On a Mac's GPU, which lacks float64, return float32; the trainer adds batches in float64 on the CPU.
        """

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Return metrics from the sums over all ranks' samples; ``loss`` is used to compare runs."""

    def rows(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return tensors (B, ...) by name, a row per sample, with one shape and dtype in all batches."""

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        """Return metrics from the rows of all samples; called on rank 0 only, with tensors on the CPU."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return tensors (B, ...) by name, a row per sample; `trainer.predict` writes a column per name."""

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        """Return texts, images and figures for TensorBoard; called after some of the evaluations.

        The method is called on every rank, because a forward pass may need all of them: every rank must make
        the same number of forward passes. The result of rank 0 is logged. Random numbers drawn here do not
        affect training.
        """


def offers(task: Task, *methods: str) -> bool:
    """Return whether the task has all these methods."""
    return all(callable(getattr(task, name, None)) for name in methods)


def refuse_own_parameters(task: Task, known: Collection[int] = ()) -> None:
    """Raise UserError if `task` has parameters that require a gradient, except those with ids in `known`."""
    for part in leaves(getattr(task, "__dict__", {})):
        for tensor in part.parameters() if isinstance(part, nn.Module) else [part]:
            is_tensor = isinstance(tensor, Tensor) and id(tensor) not in known
            if is_tensor and tensor.requires_grad and tensor.is_leaf:  # not an output that `loss` has kept
                raise UserError(
                    f"data.task: {type(task).__name__} has trainable parameters, but the optimizer and "
                    "checkpoints only include those of the model; move them into the model, or freeze them "
                    "(requires_grad_(False))"
                )


def call_begin_step(task: Any, step: int, last_step: int, model: nn.Module) -> None:
    """Call the task's `begin_step`, with the model if it has that parameter."""
    takes_model = _takes_model(getattr(task.begin_step, "__func__", task.begin_step))
    task.begin_step(step, last_step, **({"model": model} if takes_model else {}))


@functools.cache
def _takes_model(begin_step: Callable[..., None]) -> bool:
    return "model" in inspect.signature(begin_step).parameters
