"""Evaluation sums equal a direct computation in double precision, however the samples are batched."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.tasks import Classification, LanguageModelling
from trainer.tasks.cross_entropy import logits_of


class Given(nn.Module):
    """Hands its input through: the input is the logits."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def summed(
    task: Classification | LanguageModelling, logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    parts = zip(logits.split([5, 11, 1]), labels.split([5, 11, 1]), strict=True)
    return torch.stack([task.eval_sums(Given(), part) for part in parts]).sum(0)


@pytest.mark.parametrize("classes", [10, 4])
def test_classification(classes: int) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(17, classes) * 2, torch.randint(classes, (17,))
    task = Classification(label_smoothing=0.1)
    metrics = task.summarise(summed(task, logits, labels))
    order = logits.argsort(dim=1, descending=True)
    expected = {
        "loss": F.cross_entropy(logits.double(), labels).item(),
        "accuracy": (order[:, 0] == labels).double().mean().item(),
    }
    if classes > 5:
        expected["top5_accuracy"] = (order[:, :5] == labels[:, None]).any(1).double().mean().item()
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert 0 < metrics["accuracy"] < 1
    assert task.loss(Given(), (logits, labels)).item() == pytest.approx(
        F.cross_entropy(logits.double(), labels, label_smoothing=0.1).item(), rel=1e-6
    )


def test_counts_are_exact_beyond_what_float32_holds() -> None:
    sums = summed(Classification(), torch.randn(17, 10), torch.randint(10, (17,)))
    assert sums.dtype == torch.float64
    assert (sums + 2**24)[2].item() == 2**24 + 17


def test_language_modelling() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(17, 6, 256) * 3, torch.randint(256, (17, 6))
    task = LanguageModelling()
    metrics = task.summarise(summed(task, logits, targets))
    loss = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    assert metrics == pytest.approx(
        {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}, rel=1e-6
    )
    assert task.loss(Given(), (logits, targets)).item() == pytest.approx(loss, rel=1e-6)


def test_bits_per_byte_knows_how_long_a_token_is() -> None:
    sums = torch.tensor([20.0, 10.0], dtype=torch.float64)
    four = LanguageModelling(bytes_per_token=4).summarise(sums)
    assert four["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert "bits_per_byte" not in LanguageModelling(bytes_per_token=None).summarise(sums)


def test_a_hopeless_loss_has_a_finite_perplexity() -> None:
    assert LanguageModelling().summarise(torch.tensor([5000.0, 1.0]))["perplexity"] > 1e300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(17, 10).to(dtype), torch.randint(10, (17,))
    expected = F.cross_entropy(logits.double(), labels, reduction="sum").item()
    assert summed(Classification(), logits, labels)[0].item() == pytest.approx(expected, rel=1e-5)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        Classification(label_smoothing=1.5)
    with pytest.raises(ValueError, match="bytes_per_token=0"):
        LanguageModelling(bytes_per_token=0)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            [0, 9, 3],
            "the largest label is 9 and the smallest 0, but the model knows 0 to 4; set model.num_classes=10",
        ),
        ([0, -1, 3], "the largest label is 3 and the smallest -1, but the model knows 0 to 4"),
    ],
)
def test_labels_that_are_no_class_are_named(labels: list[int], words: str) -> None:
    for act in (Classification().loss, Classification().eval_sums):
        with pytest.raises(UserError, match=words):
            act(Given(), (torch.zeros(3, 5), torch.tensor(labels)))
    with pytest.raises(UserError, match=r"set model\.vocab_size=8,"):
        LanguageModelling().loss(Given(), (torch.zeros(1, 2, 5), torch.tensor([[1, 7]])))


def test_labels_that_are_none_or_probabilities_are_taken() -> None:
    assert Classification().loss(Given(), (torch.zeros(2, 5), torch.tensor([-100, 1]))).isfinite()
    assert Classification().loss(Given(), (torch.zeros(2, 5), torch.full((2, 5), 0.2))).isfinite()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_names_the_labels_of_the_first_batch() -> None:
    with pytest.raises(UserError, match="the largest label is 9"):
        Classification().loss(Given(), (torch.zeros(3, 5).cuda(), torch.tensor([0, 9, 3]).cuda()))


@pytest.mark.parametrize("task", [Classification(), LanguageModelling(), LanguageModelling(None)])
def test_a_task_yields_the_figures_it_names(task: Classification | LanguageModelling) -> None:
    sums = (
        summed(task, torch.randn(17, 7), torch.randint(7, (17,)))
        if isinstance(task, Classification)
        else None
    )
    found = task.summarise(sums if sums is not None else torch.tensor([1.0, 2.0]))
    assert set(found) == set(task.figures)


def test_logits_are_found_in_what_a_model_returns() -> None:
    logits = torch.zeros(2, 3)
    assert logits_of({"logits": logits}) is logits and logits_of(SimpleNamespace(logits=logits)) is logits
    for output, words in (({"out": logits}, "a dict of out, but"), ((logits, None), "a tuple, but")):
        with pytest.raises(UserError, match=f"the model returns {words} must return a tensor of logits"):
            logits_of(output)
