"""What is optimised: the loss of a micro-batch; and what evaluation measures, as sums that ranks can add."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import UserError


class Task(Protocol):
    """Sums, not means, cross from rank to rank: uneven last batches then weigh what they should.

    A task may have an attribute ``figures``, the names that ``summarise`` may give: with it a
    ``checkpoint.keep_best.metric`` that no evaluation will yield is refused before training.
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean over the micro-batch, a scalar to differentiate."""

    def num_samples(self, batch: Any) -> int: ...

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """float64 sums over the batch, of the same length for every batch, on the model's device."""

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """What the sums over all samples of all ranks come to; ``loss`` is among them."""


class Classification:
    """One class for each input: batches are (inputs (B, ...), labels (B,)), the model returns (B, classes).

    Evaluation: mean cross entropy (without smoothing, so that runs compare), accuracy and, where there are
    more than five classes, top5_accuracy.
    """

    figures = ("loss", "accuracy", "top5_accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} is not within [0, 1]")
        self.label_smoothing = label_smoothing
        self._cross_entropy = _CrossEntropy("model.num_classes")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return self._cross_entropy(model(inputs).float(), labels, label_smoothing=self.label_smoothing)

    def num_samples(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """[loss, right, samples, right among the top five, samples with more than five classes]"""
        inputs, labels = batch
        logits = model(inputs).float()
        has_top5 = logits.shape[1] > 5
        hits = logits.topk(5 if has_top5 else 1, dim=1).indices == labels.unsqueeze(1)
        loss = self._cross_entropy(logits, labels, reduction="sum")
        count = torch.full_like(loss, len(labels), dtype=torch.float64)
        return torch.stack([loss.double(), hits[:, 0].sum(), count, hits.sum() * has_top5, count * has_top5])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss, top1, count, top5, count_top5 = sums.tolist()
        metrics = {"loss": loss / count, "accuracy": top1 / count}
        return metrics | {"top5_accuracy": top5 / count_top5} if count_top5 else metrics


class LanguageModelling:
    """The next token at each position: batches are (tokens, targets), (B, T) each; logits are (B, T, vocab).

    Evaluation: mean cross entropy in nats per token, its exponential the perplexity, and bits_per_byte.

    Args:
        bytes_per_token: 1 for text read byte by byte, otherwise the tokenizer's mean; None leaves
            bits_per_byte out.
    """

    def __init__(self, bytes_per_token: float | None = 1.0) -> None:
        if bytes_per_token is not None and not bytes_per_token > 0:
            raise ValueError(f"bytes_per_token={bytes_per_token} is not above 0")
        self.bytes_per_token = bytes_per_token
        self.figures = ("loss", "perplexity") + (("bits_per_byte",) if bytes_per_token is not None else ())
        self._cross_entropy = _CrossEntropy("model.vocab_size")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(model, batch, "mean")

    def num_samples(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """[loss, tokens]"""
        loss = self._loss(model, batch, "sum").double()
        return torch.stack([loss, torch.full_like(loss, batch[1].numel())])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        total, tokens = sums.tolist()
        loss = total / tokens
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^710 overflows
        if self.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
        tokens, targets = batch
        logits = model(tokens).float().flatten(0, 1)
        return self._cross_entropy(logits, targets.flatten(), reduction=reduction)


class _CrossEntropy:
    """torch's, which on a CPU names no more than one label that is no class, and on a GPU none.

    A GPU is asked for the labels of the first batch alone: each look would wait for it.
    """

    def __init__(self, setting: str) -> None:
        self._setting, self._looked = setting, False

    def __call__(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if labels.is_cuda and not self._looked:
            self._refuse_others(logits, labels)
        self._looked = True
        try:
            return F.cross_entropy(logits, labels, **options)
        except IndexError:
            self._refuse_others(logits, labels)
            raise

    def _refuse_others(self, logits: Tensor, labels: Tensor) -> None:
        """Raise UserError where a label is no class of the model; -100 is torch's word for none at all."""
        if labels.is_floating_point():  # the probability of each class
            return
        num_classes, given = logits.shape[1], labels[labels != -100]
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < num_classes:
            smallest, largest = int(given.min()), int(given.max())
            raise UserError(
                f"the largest label is {largest} and the smallest {smallest}, but the model knows 0 to "
                f"{num_classes - 1}; set {self._setting}={max(largest + 1, num_classes)}, or look at the data"
            )
