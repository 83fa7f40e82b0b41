"""Language modelling: prediction of the next token."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.accelerator import double
from trainer.errors import UserError
from trainer.tasks.base import Evaluation, Shown
from trainer.tasks.cross_entropy import (
    CrossEntropy,
    counted,
    inputs_and_labels,
    logits_of,
    num_counted,
    raw_logits,
)

_TEMPERATURE = 0.8


class LanguageModelling:
    """Prediction of the next token.

    Batches are (tokens, targets), (B, T) each, and the model returns logits (B, T, vocab). A target of -100,
    such as padding, is ignored.

    Metrics: loss (cross entropy in nats per token), perplexity and bits_per_byte. TensorBoard shows the
    model's continuation of the first validation sequence.

    Args:
        bytes_per_token: mean number of bytes per token, 1 for byte tokens; None omits bits_per_byte.
        show_tokens: length of the continuation; each token takes a forward pass. 0 shows none.
        head: where the loss is computed. `logits`: in the task, from the model's logits. `loss`: in
            the model, so that train.compile compiles both as one graph. `chunks`: in the model, for a few
            rows of logits at a time, which needs F.linear_cross_entropy. For `loss` and `chunks`, the model's
            forward must have the parameters of models.gpt.GPT.

    Raises:
        ValueError: an argument is out of range, or torch lacks F.linear_cross_entropy.
    """

    def __init__(
        self, bytes_per_token: float | None = 1.0, show_tokens: int = 64, head: str = "logits"
    ) -> None:
        if bytes_per_token is not None and not bytes_per_token > 0:
            raise ValueError(f"bytes_per_token={bytes_per_token}: expected a number above 0, or null")
        if show_tokens < 0:
            raise ValueError(f"show_tokens={show_tokens}: expected 0 or more")
        if head not in ("logits", "loss", "chunks"):
            raise ValueError(f"head={head}: expected logits, loss or chunks")
        if head == "chunks" and not hasattr(F, "linear_cross_entropy"):
            raise ValueError(
                f"head=chunks needs F.linear_cross_entropy, which torch {torch.__version__} does not have; "
                "use a newer torch, or head=loss"
            )
        self.head = head
        self.bytes_per_token, self.show_tokens = bytes_per_token, show_tokens
        self.metric_names = ("loss", "perplexity") + (
            ("bits_per_byte",) if bytes_per_token is not None else ()
        )
        self._cross_entropy = CrossEntropy("model.vocab_size")

    def compile(self) -> None:
        self._cross_entropy.compile()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(model, batch, "mean")

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return num_counted(inputs_and_labels(batch)[1])

    def num_tokens(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return counted(batch[1]).sum()

    def eval_sums(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sums [loss, tokens]."""
        loss = double(self._loss(model, batch, "sum"))
        return torch.stack([loss, self.num_tokens(batch).to(loss)])

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return loss (B,), in nats per token, and accuracy (B,); NaN without counted tokens."""
        tokens, targets = inputs_and_labels(batch)
        logits = logits_of(model(tokens))
        loss = self._cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        right, count = logits.argmax(dim=2) == targets, counted(targets).sum(dim=1)
        return {"loss": loss.view_as(targets).sum(dim=1) / count, "accuracy": right.sum(dim=1) / count}

    def summarise(self, sums: Tensor) -> dict[str, float]:
        loss = float(sums[0] / sums[1])  # NaN without counted tokens
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^710 overflows
        if self.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        if not self.show_tokens:
            return Shown()
        tokens = evaluation.batch[0][:1]
        length = tokens.shape[1]  # constant, so that the model is compiled only once
        generator = torch.Generator().manual_seed(0)  # the same draws at each evaluation, for comparison
        for _ in range(self.show_tokens):
            scores = logits_of(model(tokens[:, -length:]))[0, -1].cpu()
            probabilities = scores.div(_TEMPERATURE).softmax(dim=0)
            probabilities = probabilities.nan_to_num(1.0)  # NaN must not fail the run
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)[None]], dim=1)
        before, after = (_quoted(part.tolist(), len(scores)) for part in tokens[0].tensor_split([length]))
        return Shown({"eval/text": f"{before}\n\ncontinues:\n\n{after}"})

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
        tokens, targets = inputs_and_labels(batch)
        if self.head != "logits":
            try:
                loss: Tensor = model(
                    tokens, targets=targets, reduction=reduction, chunks=self.head == "chunks"
                )
            except TypeError as error:
                if "unexpected keyword argument" not in str(error):
                    raise
                raise UserError(
                    f"data.task.head={self.head} needs a model whose forward has the parameters targets, "
                    "reduction and chunks, like models.gpt.GPT; set data.task.head=logits"
                ) from error
            return loss
        logits = raw_logits(model(tokens)).flatten(0, 1)
        return self._cross_entropy(logits, targets.flatten(), reduction=reduction)


def _quoted(tokens: list[int], vocab_size: int) -> str:
    """Return tokens as a Markdown code block: bytes as text, other tokens as numbers."""
    text = bytes(tokens).decode(errors="replace") if vocab_size <= 256 else " ".join(map(str, tokens))
    return "\n".join(f"    {line}" for line in text.splitlines())
