"""Evaluation sums equal a direct computation in double precision, however the samples are batched."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.tasks import Classification, LanguageModelling, MultiLabel, OwnLoss, Regression
from trainer.tasks.cross_entropy import logits_of


class Given(nn.Module):
    """A model that returns its input as logits."""

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
    assert set(metrics) <= set(task.metric_names)
    assert 0 < metrics["accuracy"] < 1
    assert task.loss(Given(), (logits, labels)).item() == pytest.approx(
        F.cross_entropy(logits.double(), labels, label_smoothing=0.1).item(), rel=1e-6
    )


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
    assert set(metrics) == set(task.metric_names)


def test_bits_per_byte_uses_bytes_per_token() -> None:
    sums = torch.tensor([20.0, 10.0], dtype=torch.float64)
    four = LanguageModelling(bytes_per_token=4).summarise(sums)
    assert four["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert "bits_per_byte" not in LanguageModelling(bytes_per_token=None).summarise(sums)


def test_losses_of_half_precision_logits_are_summed_in_float32() -> None:
    logits, labels = torch.randn(17, 10).bfloat16(), torch.randint(10, (17,))
    expected = F.cross_entropy(logits.double(), labels, reduction="sum").item()
    assert summed(Classification(), logits, labels)[0].item() == pytest.approx(expected, rel=1e-5)


def test_labels_outside_the_classes_are_named() -> None:
    words = "the labels range from -1 to 9, but the model has classes 0 to 4; set model.num_classes=10"
    for act in (Classification().loss, Classification().eval_sums):
        with pytest.raises(UserError, match=words):
            act(Given(), (torch.zeros(3, 5), torch.tensor([-1, 9, 3])))
    with pytest.raises(UserError, match=r"set model\.vocab_size=8,"):
        LanguageModelling().loss(Given(), (torch.zeros(1, 2, 5), torch.tensor([[1, 7]])))


@pytest.mark.parametrize("classes", [10, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_ignored_labels(classes: int, dtype: torch.dtype) -> None:
    """All bytes count: 156 is not ignored, although it is -100 as a byte."""
    torch.manual_seed(0)
    logits, labels = torch.randn(17, classes), torch.randint(classes, (17,), dtype=dtype)
    if dtype == torch.int64:
        labels[[1, 6, 7, 8, 9, 16]] = -100
    task, counts = Classification(label_smoothing=0.2), labels.long() != -100
    assert task.weight((logits, labels)) == counts.sum()
    found = task.summarise(summed(task, logits, labels))
    of_counted = task.eval_sums(Given(), (logits[counts], labels[counts]))
    assert found == pytest.approx(task.summarise(of_counted))
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    if dtype == torch.int64:
        none = task.summarise(task.eval_sums(Given(), (logits[7:8], labels[7:8])))
        assert math.isnan(none["loss"]) and math.isnan(none["accuracy"])


@pytest.mark.parametrize("classes", [10, 4])
def test_labels_may_be_class_probabilities_or_one_hot(classes: int) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(17, classes), torch.randint(classes, (17,))
    one_hot, task = F.one_hot(labels, classes), Classification()
    by_class = task.summarise(summed(task, logits, labels))
    assert 0 < by_class["accuracy"] < 1
    for same in (one_hot, one_hot.bool(), one_hot.float()):
        assert task.summarise(summed(task, logits, same)) == pytest.approx(by_class)
        assert task.loss(Given(), (logits, same)) == pytest.approx(by_class["loss"])
        assert torch.equal(task.predict(Given(), (logits, same))["label"], labels)
    shares = torch.rand(17, classes).softmax(dim=1)
    mixed = task.summarise(summed(task, logits, shares))
    assert mixed["loss"] == pytest.approx(F.cross_entropy(logits.double(), shares.double()).item())
    assert mixed["accuracy"] == pytest.approx((logits.argmax(1) == shares.argmax(1)).double().mean().item())
    assert task.weight((logits, shares)) == 17
    for act in (task.loss, task.eval_sums):
        for wrong in (shares[:, 1:], labels.float(), one_hot[:, 1:]):
            with pytest.raises(
                UserError, match=r"must be class indices \(integers of shape \(17,\)\) or class probabilities"
            ):
                act(Given(), (logits, wrong))
        for rows in (one_hot, shares):
            with pytest.raises(UserError, match="which must be at least 0, but the smallest is -100"):
                act(Given(), (logits, torch.cat([rows[1:], torch.full_like(rows[:1], -100)])))


def test_sequence_padding_is_ignored() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(17, 6, 256) * 3, torch.randint(256, (17, 6))
    targets[torch.rand(17, 6) < 0.6] = -100
    targets[3] = -100
    counts, task = targets != -100, LanguageModelling()
    loss = F.cross_entropy(logits[counts].double(), targets[counts]).item()
    metrics = task.summarise(summed(task, logits, targets))
    assert metrics["loss"] == pytest.approx(loss) and metrics["perplexity"] == pytest.approx(math.exp(loss))
    assert task.weight((logits, targets)) == task.num_tokens((logits, targets)) == counts.sum()
    rows = task.predict(Given(), (logits, targets))
    assert rows["loss"][0].item() == pytest.approx(F.cross_entropy(logits[0], targets[0]).item())
    right = logits[0].argmax(1) == targets[0]
    assert rows["accuracy"][0] == right.sum() / counts[0].sum()
    assert rows["loss"][3].isnan() and rows["accuracy"][3].isnan()


class Loses(nn.Module):
    """A model with its own loss, a mean over the counted labels; like a causal language model if `shifted`."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.shifted = shifted

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, -2), labels.flatten()))


@pytest.mark.parametrize("shifted", [False, True])
def test_a_models_own_loss_is_averaged_over_counted_labels(shifted: bool) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(17, 6, 8), torch.randint(8, (17, 6))
    labels[torch.rand(17, 6) < 0.6] = -100
    labels[16] = -100  # a batch of its own
    task, model = OwnLoss(shifted=shifted), Loses(shifted)
    parts = [
        {"logits": a, "labels": b}
        for a, b in zip(logits.split([5, 11, 1]), labels.split([5, 11, 1]), strict=True)
    ]
    assert sum(map(task.weight, parts)) == (labels[:, int(shifted) :] != -100).sum()
    found = task.summarise(torch.stack([task.eval_sums(model, part) for part in parts]).sum(0))
    assert found["loss"] == pytest.approx(model(logits, labels).loss.item())
    with pytest.raises(UserError, match=r"data\.task\.shifted=true for a causal language model"):
        OwnLoss().weight(parts[0])
    each = {"logits": logits[:5, 0], "labels": torch.tensor([1, -100, 2, 3, 4])}
    assert OwnLoss().weight(each) == 4 and OwnLoss().weight({"logits": logits}) == 17
    assert "accuracy" not in found
    with pytest.raises(UserError, match="which this model does not return"):
        task.predict(model, parts[0])
    with pytest.raises(
        UserError, match="a batch is a tuple, but OwnLoss passes batches to the model as keyword arguments"
    ):
        task.loss(model, (logits, labels))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["object", "dict"])
def test_accuracy_of_a_model_that_computes_its_own_loss(form: str) -> None:
    """If the model also returns logits (B, classes)."""
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 4), torch.tensor([0, 1, 2, 3, 0, -100, 1, 2, 3])

    def model(logits: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        both = {"loss": loss, "logits": logits}
        return {"object": SimpleNamespace(**both), "dict": both}[form]

    def returns_a_tuple(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(logits, labels), logits @ torch.ones(4, 16)

    task: Any = OwnLoss()
    batch = {"logits": logits, "labels": labels}
    assert task.summarise(task.eval_sums(returns_a_tuple, batch)).keys() == {"loss"}
    with pytest.raises(UserError, match="which this model does not return"):
        task.predict(returns_a_tuple, batch)
    sums = [
        task.eval_sums(model, {"logits": logits[at], "labels": labels[at]}) for at in (slice(5), slice(5, 9))
    ]
    right = (logits.argmax(1) == labels)[labels != -100].double().mean().item()
    assert task.summarise(sum(sums)) == pytest.approx(
        {"loss": F.cross_entropy(logits, labels).item(), "accuracy": right}
    )
    known, unknown = (task.predict(model, {"logits": logits, **more}) for more in ({"labels": labels}, {}))
    assert known["label"].equal(labels) and "label" not in unknown
    assert unknown["prediction"].equal(logits.argmax(1)) and unknown["probabilities"].equal(logits.softmax(1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_invalid_labels_of_the_first_batch_are_named() -> None:
    with pytest.raises(UserError, match="the labels range from 0 to 9"):
        Classification().loss(Given(), (torch.zeros(3, 5).cuda(), torch.tensor([0, 9, 3]).cuda()))


def test_logits_are_found_in_a_models_output() -> None:
    logits = torch.zeros(2, 3)
    assert logits_of({"logits": logits}) is logits and logits_of(SimpleNamespace(logits=logits)) is logits
    for output, words in (({"out": logits}, "a dict of out, but"), ((logits, None), "a tuple, but")):
        with pytest.raises(UserError, match=f"the model returns {words} must return a tensor of logits"):
            logits_of(output)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_labels_of_any_integer_dtype_give_the_same_training(dtype):
    model, inputs, labels = nn.Linear(4, 2), torch.randn(3, 4), torch.tensor([0, 1, 1])
    loss = [Classification().loss(model, (inputs, given)) for given in (labels, labels.to(dtype))]
    assert torch.equal(*loss)


@pytest.mark.parametrize("task", [Classification(), LanguageModelling(), Regression(), MultiLabel()])
def test_a_batch_with_unexpected_parts_raises(task):
    with pytest.raises(UserError, match="a batch is a dict, but this task expects two"):
        task.loss(nn.Linear(4, 2), {"x": torch.ones(2)})


@pytest.mark.slow
def test_a_compiled_task_compiles_its_loss_except_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compiled = functools.partial(
        torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    monkeypatch.setattr(torch, "compile", compiled)
    task = Classification()
    task._cross_entropy.compile()
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert task.loss(nn.Identity(), (logits.to("meta"), labels.to("meta"))).is_meta
    assert not graphs
    plain = Classification().loss(nn.Identity(), (logits, labels))
    assert torch.equal(task.loss(nn.Identity(), (logits, labels)), plain)
    assert len(graphs) == 1
