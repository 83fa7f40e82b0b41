"""What a task may offer: a class of anybody's with `loss`, and as much of the rest as it has a use for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, on every rank but for `rows`."""

    figures: dict[str, float]
    sums: Tensor | None  # of eval_sums, over all samples, float64 on the model's device
    rows: dict[str, Tensor] | None  # of all samples in the dataset's order, on the CPU of rank 0 alone
    batch: Any  # the first held-out batch of this rank, on its device


@dataclass(frozen=True)
class Shown:
    """What there is to see of an evaluation, by names under which TensorBoard files it."""

    texts: Mapping[str, str] = field(default_factory=dict)  # Markdown
    images: Mapping[str, Tensor] = field(default_factory=dict)  # (3 or 1, H, W), uint8 or floats in [0, 1]
    figures: Mapping[str, Callable[[], "Figure"]] = field(default_factory=dict)  # drawn on rank 0 alone


class Task(Protocol):
    """`loss`, and for evaluation sums, rows, or both; without `train.eval_every_epochs`, neither.

    Sums are what ranks can add: means, accuracies. Uneven last batches then weigh what they should. Rows are
    for what no sum can say, such as AUC, F1 or retrieval: some numbers for each sample, which come together
    on rank 0, each sample once and in the dataset's order, at any world size. Nothing here need be derived
    from this class.

    A task may have an attribute ``figures``, the names of all that it may report: with it a
    ``checkpoint.keep_best.metric`` that no evaluation will yield is refused before training. Where it
    minimises another loss than evaluation computes, ``loss`` may leave that of its batch, detached, as
    attribute ``plain_loss``: it is logged to compare with ``eval/loss``.
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean over the labels of the micro-batch that count, a scalar to differentiate.

        Where none counts it may be NaN, but its gradient must be 0, as that of torch's cross entropy is.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """How many labels of the micro-batch count, or their weights' sum: what `loss` is the mean over.

        Called once for each training batch, while it is still on the host. A step divides by the sum over
        all ranks and micro-batches: its loss is the mean over all labels that count, and 0 where none does.
        Without this method each micro-batch counts the same.
        """

    def compile(self) -> None:
        """Compile what `loss` computes besides the model; called once, with train.compile=true."""

    def num_tokens(self, batch: Any) -> int | Tensor:
        """How many tokens of the batch count, for speed/tokens_per_second; may be a tensor."""

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """float64 sums over the batch, of the same length for every batch, on the model's device."""

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """What the sums over all samples of all ranks come to; by the name ``loss``, what runs compare."""

    def rows(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """By name, tensors (B, ...) with a row for each sample, of one shape and dtype in all batches."""

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        """What the rows of all samples come to; called on rank 0 alone, with tensors on the CPU."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """By name, tensors (B, ...) a row for each sample: the columns of `python -m trainer.predict`."""

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        """What there is to see, now and then after an evaluation.

        Called on every rank, since a forward pass may need all of them, so each must make as many; what
        rank 0 returns is logged. Random numbers drawn here leave those of training as they were.
        """


def offers(task: Task, *methods: str) -> bool:
    """Whether the task has all these methods."""
    return all(callable(getattr(task, name, None)) for name in methods)
