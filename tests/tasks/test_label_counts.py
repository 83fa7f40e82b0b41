"""Ignored labels: the same model at any world size, with means over the counted labels."""

import copy
import functools
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from models.gpt import GPT
from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import context_of
from trainer.data.digits import Digits
from trainer.data.text.in_memory import Text
from trainer.dry_run.step import _check_type
from trainer.errors import UserError
from trainer.tasks import Classification, LanguageModelling
from trainer.tasks.cross_entropy import IGNORED
from trainer.tasks.label_counts import count_labels, divided, loss_of

STEPS, SAMPLES = 10, 8  # in these there are micro-batches, ranks and steps in which no label counts


class Blanked(Digits):
    """Digits, of which one in ten has a label."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        kept = torch.rand(len(self), generator=torch.Generator().manual_seed(7)) < 0.1
        self.labels = torch.where(kept, self.labels, -100)


class Padded(Text):
    """Windows of text; most are only padding, the others are padded from different positions on."""

    def __init__(self, split: str, **options: Any) -> None:
        super().__init__(split, **options)
        self.numbers = self.numbers[:200]

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = super().__getitems__(indices)
        lengths = torch.tensor([(index * 7) % 64 for index in indices])[:, None] - 52
        return tokens, torch.where(torch.arange(16) < lengths, targets, -100)

    def draw(self, indices: Any, numbers: Any) -> tuple[Tensor, Tensor]:
        return self.__getitems__(indices)


PLAIN = (
    "logger=jsonl",
    f"train.max_steps={STEPS}",
    f"train.global_batch_size={SAMPLES}",
    "schedule=constant",
)
PLAIN += ("optim.momentum=0", "optim.weight_decay=0", "checkpoint.every_epochs=null")
DATA = {
    "digits": (
        "data.dataset._target_=tests.tasks.test_label_counts.Blanked",
        "model.hidden=[32]",
        "data.task.label_smoothing=0",
    ),
    "text": (
        "data=text",
        "data.dataset._target_=tests.tasks.test_label_counts.Padded",
        "data.dataset.block_size=16",
        "model=gpt",
        "model.width=16",
        "model.depth=1",
        "model.num_heads=2",
        "optim.lr=0.3",
        "+data.task.show_tokens=0",
    ),
}
WAYS: dict[str, tuple[Any, ...]] = {
    "single, accumulated": (1, "strategy=single", "train.micro_batch_size=2"),
    "ddp, accumulated": (2, "strategy=ddp", "train.micro_batch_size=1"),
    "fsdp": (2, "strategy=fsdp", "train.micro_batch_size=2", "train.clip_grad_norm=1000"),
    "servers, apart": (3, "strategy=parameter_server", "strategy.servers=1", "train.micro_batch_size=2"),
}
ALL_DATA = ("single, accumulated", "ddp, accumulated", "fsdp")


def fitted(*overrides: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics of a run, and its model."""
    from trainer.loop import fit

    with context_of(*overrides) as context:
        metrics = fit(context)
        state = context.state.model.state_dict()
        whole = {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in state.items()}
        return metrics, whole


def by_hand(*overrides: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """As `fitted` in one process, with plain torch: sums over the batch, divided by the counted labels."""
    with context_of(*overrides) as context:
        model, lr = copy.deepcopy(context.state.model), context.state.optimizer.param_groups[0]["lr"]
        smoothing = getattr(context.task, "label_smoothing", 0.0)
        losses: list[float] = []
        of_last_epoch = 0
        for epoch in range(9):
            of_last_epoch = len(losses)
            for inputs, labels in context.data.train_loader.epoch(epoch):
                if len(losses) == STEPS:
                    break
                logits = model(inputs).movedim(-1, 1)
                count = max(1, int((labels != -100).sum()))
                loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / count
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= lr * parameter.grad
                losses.append(loss.item())
            if len(losses) == STEPS:
                break
        assert {0.0} < set(losses), f"some step has no label, and most have: {losses}"
        mean = sum(losses[of_last_epoch:]) / len(losses[of_last_epoch:])
        return {"train/loss": mean} | held_out(model, context.data.eval_loader), model.state_dict()


@torch.no_grad()
def held_out(model: nn.Module, loader: Any) -> dict[str, float]:
    """Return means over all counted held-out labels, computed sample by sample."""
    losses: list[Tensor] = []
    hits = count = 0
    for (inputs, labels), indices in loader:
        for index in range(len(indices)):
            logits = model(inputs[index : index + 1]).movedim(-1, 1).double()
            label = labels[index : index + 1]
            losses.append(F.cross_entropy(logits, label, reduction="sum"))
            hits += int((logits.argmax(1) == label).sum())
            count += int((label != -100).sum())
    loss = float(sum(losses)) / count
    return {"eval/loss": loss, "eval/accuracy": hits / count, "eval/perplexity": math.exp(loss)}


@pytest.fixture(scope="module")
def made_by_hand(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[dict[str, float], dict[str, Tensor]]]:
    """Once for each kind of data."""

    @functools.cache
    def make(data: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        run_dir = f"run_dir={tmp_path_factory.mktemp('by_hand')}"
        return run_ranks(by_hand, 1, *PLAIN, *DATA[data], "strategy=single", run_dir, init=False)[0]

    return make


QUICK = {("digits", "ddp, accumulated")}


@pytest.mark.parametrize(
    ("data", "way"),
    [
        pytest.param(data, way, marks=[pytest.mark.slow] * ((data, way) not in QUICK))
        for data in DATA
        for way in WAYS
        if data == "digits" or way in ALL_DATA
    ],
)
def test_model_and_metrics_equal_a_manual_computation(
    made_by_hand: Callable[[str], tuple[dict[str, float], dict[str, Tensor]]],
    data: str,
    way: str,
    tmp_path: Path,
) -> None:
    world_size, *overrides = WAYS[way]
    options = (*PLAIN, *DATA[data], *overrides, f"run_dir={tmp_path}")
    metrics, model = run_ranks(fitted, world_size, *options, init=False)[0]
    expected, by_hand = made_by_hand(data)
    assert all(math.isfinite(metrics[name]) for name in metrics.keys() & expected.keys())
    for name, value in by_hand.items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-5)
    for name in metrics.keys() & expected.keys():
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    metric = "eval/perplexity" if data == "text" else "eval/accuracy"
    assert {"train/loss", "eval/loss", metric} <= metrics.keys() & expected.keys()


def of(samples: int, parts: int = 2) -> Any:
    """Return a split with `parts` micro-batches of `samples` samples."""
    return SimpleNamespace(micro_batch_size=samples, num_micro_batches=parts)


HEADS = ("logits", "loss", *(["chunks"] if hasattr(F, "linear_cross_entropy") else []))


@pytest.mark.parametrize("head", HEADS)
def test_a_step_without_labels_has_zero_gradients(head: str) -> None:
    """With labels, the gradients are unchanged."""
    torch.manual_seed(0)
    model = GPT(vocab_size=50, block_size=8, width=16, depth=1, num_heads=2)
    task = LanguageModelling(head=head)
    tokens, targets = torch.randint(50, (2, 3, 8))
    for labels, count in ((torch.full_like(targets, -100), 0), (targets, 24)):
        model.zero_grad()
        loss = divided(task.loss(model, (tokens, labels)), 24, count)
        loss.backward()
        largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
        assert math.isfinite(largest) and (largest > 0) == (loss.item() > 0) == bool(count)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (lambda loss: loss.item(), "a float"),
        (lambda loss: loss.expand(3), r"a tensor of shape \(3,\)"),
        (lambda loss: loss * torch.tensor(1j), "a torch.complex64 tensor"),
        (lambda loss: loss.detach(), "a torch.float32 tensor that requires no gradient"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(wrong: Any, shown: str) -> None:
    class Mine:
        def loss(self, model: nn.Module, batch: Tensor) -> Any:
            return wrong(model(batch).sum())

    with pytest.raises(UserError, match=f"Mine.loss returns {shown}, but must return a scalar"):
        _check_type(Mine(), Mine().loss(nn.Linear(2, 2), torch.ones(3, 2)), {})


def _task(name: str, **option: str) -> tuple[str, ...]:
    own = (f"+data.task.{key}={value}" for key, value in option.items())
    return (f"data.task._target_={__name__}.{name}", "~data.task.label_smoothing", *own)


class Differentiates(Classification):
    """A task that calls backward() itself."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        super().loss(model, batch).backward()
        return super().loss(model, batch)


def test_a_loss_whose_backward_has_run_is_refused(tmp_path: Path) -> None:
    words = (*PLAIN, *DATA["digits"][:2], "strategy=single", *_task("Differentiates"))
    (message,) = refusals((*words, f"run_dir={tmp_path}"))
    assert "Differentiates.loss sets the gradients of parameters, as backward() does" in message


class Reaches(Classification):
    """A task whose loss depends on no parameter, or that creates its own parameters in the first pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if self.what == "late":
            self.own = [nn.Linear(1, 1)]
        self.kept = loss, model  # has parameters, but none of its own
        return loss.detach().requires_grad_() if self.what == "nothing" else loss


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "nothing",
            "no parameter received a gradient in the first backward pass. The loss does not depend on",
        ),
        ("late", "Reaches has trainable parameters, but the optimizer"),
    ],
)
def test_a_loss_that_trains_no_parameter_of_the_model_or_its_own(
    what: str, expected: str, tmp_path: Path
) -> None:
    words = (*PLAIN, *DATA["digits"][:2], "strategy=single", f"run_dir={tmp_path}")
    (message,) = refusals((*words, *_task("Reaches", what=what)))
    assert expected in message, message


def test_a_loss_of_0_by_0_is_0_for_a_model_that_returns_an_object() -> None:
    class Wrapped(nn.Linear):
        def forward(self, rows: Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(rows))

    class Mine:
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return (model(batch).logits * 0).sum() / torch.zeros(())

    model = Wrapped(2, 2)
    divided(loss_of(Mine(), model, torch.ones(3, 2), 0)[0], 1, 0).backward()
    assert not any(p.grad.count_nonzero() for p in model.parameters() if p.grad is not None)


class Unweighted:
    """A mean over the samples, without `weight`."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_the_batch_size_is_found_or_the_batch_refused() -> None:
    task, rows = Unweighted(), torch.zeros(5, 2)
    assert count_labels(task, (rows, rows[:, 0], torch.tensor(0.1), torch.ones(1, 9)), of(4)) == 5
    assert count_labels(task, (rows[:1], rows[:1, 0]), of(4)) == count_labels(task, (rows[:1],), of(1)) == 1
    assert count_labels(task, object(), of(4)) == count_labels(task, (rows, rows[:2]), of(4, parts=1)) == 4
    unknown: list[tuple[int, Any]] = [
        (4, (rows, rows[:2])),
        (4, {"tokens": rows, "lengths": rows[:4, 0]}),  # its loss may be a mean over either
        (1, {"tokens": rows, "lengths": rows[:1, 0]}),
        (4, torch.zeros(5, 4, 2)),  # the time first
    ]
    for samples, batch in unknown:
        with pytest.raises(UserError, match=rf"of {samples} samples whose tensors have the shapes.*give Unw"):
            count_labels(task, batch, of(samples))


def test_a_task_without_a_weight_gets_no_uncounted_labels() -> None:
    """Cross-entropy ignores these labels, so the weight of a micro-batch would be wrong."""

    @dataclass
    class Parts:
        rows: Tensor
        labels: Tensor

    class Moves(Parts):
        def to(self, device: torch.device) -> "Moves":
            return Moves(self.rows.to(device), self.labels.to(device))

    batch = torch.zeros(3, 2), torch.tensor([1, IGNORED, 0])
    for each in (batch, UserDict(enumerate(batch)), Parts(*batch), [Moves(*batch)], {"graph": Moves(*batch)}):
        with pytest.raises(UserError, match=r"labels of -100, .* give Unweighted a method weight\(batch\)"):
            count_labels(Unweighted(), each, of(3))
    assert count_labels(Unweighted(), batch, of(3, parts=1)) == 3
