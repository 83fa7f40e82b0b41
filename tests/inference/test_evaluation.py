"""Evaluation from rows computes metrics over all samples at any world size; what tasks show is logged."""

import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.runs import context_of
from trainer import evaluation
from trainer.data.digits import Digits
from trainer.errors import UserError
from trainer.evaluation import _from_rank_0, evaluate, independent_copy
from trainer.tasks import Classification, Evaluation, LanguageModelling, MultiLabel, Regression
from trainer.tasks.ranking import auc

MULTI_LABEL = (
    f"data.dataset._target_={__name__}.DigitTraits",
    "data.task._target_=trainer.tasks.MultiLabel",
    "~data.task.label_smoothing",
)


class DigitTraits(Digits):
    """Digits with four traits of 0 and 1: a closed loop, even, prime, at least five."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        traits = ({0, 6, 8, 9}, {0, 2, 4, 6, 8}, {2, 3, 5, 7}, {5, 6, 7, 8, 9})
        self.labels = torch.tensor([[float(d in those) for those in traits] for d in self.labels.tolist()])
        self.num_classes = len(traits)


class Given(nn.Module):
    """Returns its input."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs


def _evaluated(run_dir: str) -> dict[str, Any]:
    """Return the metrics, scores and labels of an untrained model; on rank 0 also the rows."""
    words = ("strategy=ddp", "train.max_steps=4", "train.global_batch_size=48", f"run_dir={run_dir}")
    with context_of(*MULTI_LABEL, *words) as context:
        found = evaluate(context.model_context, context.data.eval_loader)
        return {"metrics": found.metrics, "rows": found.rows}


@pytest.mark.slow
def test_auc_is_over_all_samples_at_any_world_size(tmp_path: Any) -> None:
    """None of the world sizes divides the 359 held-out samples."""
    alone, *more = [run_ranks(_evaluated, size, str(tmp_path / str(size)), init=False) for size in (1, 3)]
    rows = alone[0]["rows"]
    assert torch.equal(rows["labels"], DigitTraits("eval").labels > 0.5)
    expected = [auc(rows["scores"][:, k], rows["labels"][:, k]) for k in range(4)]
    assert alone[0]["metrics"]["auc"] == pytest.approx(sum(expected) / 4, abs=1e-14)
    assert 0.2 < alone[0]["metrics"]["auc"] < 0.8
    for ranks in more:
        assert torch.equal(ranks[0]["rows"]["labels"], rows["labels"])
        torch.testing.assert_close(ranks[0]["rows"]["scores"], rows["scores"], atol=1e-5, rtol=0)
        assert all(rank["rows"] is None for rank in ranks[1:])
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)


def test_multi_label_metrics_skip_labels_without_a_ranking() -> None:
    scores = torch.tensor([[2.0, 1, -1], [1, -1, -2], [-1, 2, -3]])
    labels = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]])  # no rank has the third
    task = MultiLabel()
    rows = task.rows(Given(), (scores, labels))
    metrics = task.summarise_rows(rows)
    assert set(metrics) == set(task.metric_names)
    assert metrics["auc"] == (0.5 + 1) / 2
    assert metrics["mean_average_precision"] == pytest.approx(((1 + 2 / 3) / 2 + 1) / 2)
    assert metrics["f1"] == 2 * 2 / (4 + 3)
    assert metrics["macro_f1"] == pytest.approx((0.5 + 2 / 3 + 0) / 3)
    assert metrics["loss"] == pytest.approx(task.loss(Given(), (scores, labels)).item())
    with pytest.raises(UserError, match="the two must be equal; set model"):
        task.loss(Given(), (scores[:, :2], labels))
    for act in (task.weight, partial(task.rows, Given())):
        for unknown in (-100, math.nan):
            with pytest.raises(UserError, match="but MultiLabel expects 0 to 1 and has no ignored value"):
                act((scores, labels.where(labels > 0, unknown)))


class Counts(Classification):
    """Keeps a metric object, as with torchmetrics, and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.parts = torch.zeros(1), [nn.Linear(1, 1).requires_grad_(False)]

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += len(batch[1])
        return super().eval_sums(model, batch)


class WithFiller(list[Any]):
    batch_size = 64


def _counted(run_dir: str) -> float:
    words = (f"data.task._target_={__name__}.Counts", "~data.task.label_smoothing", "strategy=single")
    with context_of(*words, f"run_dir={run_dir}") as context:
        batch = next(iter(context.data.eval_loader))[0]
        numbers = [*range(len(batch[1]))]
        evaluate(context.model_context, WithFiller([(batch, numbers), (batch, [])]))  # type: ignore[arg-type]
        return context.task.seen.item() / len(batch[1])


def test_a_metric_object_of_a_task_counts_no_filler_batches(tmp_path: Any) -> None:
    assert run_ranks(_counted, 1, str(tmp_path), init=False) == [1]
    task, locked = Counts(), Counts()
    copied = independent_copy(task)
    assert copied is not task and copied.seen is not task.seen
    assert copied.parts[0].weight is task.parts[0].weight
    locked.lock = threading.Lock()
    assert independent_copy(locked) is locked


def _differing() -> tuple[dict[str, float], list[str]]:
    rank, warnings = torch.distributed.get_rank(), list[str]()
    heard: Any = SimpleNamespace(warning=lambda text, *parts: warnings.append(text % parts))
    evaluation.log = heard
    here: Any = SimpleNamespace(world_size=2, is_main=rank == 0)
    return _from_rank_0({"loss": math.nan, "seen": 19.0 - rank}, "Counts.summarise", here), warnings


def test_a_metric_that_differs_between_ranks_is_reported() -> None:
    (metrics, warnings), (others, nothing) = run_ranks(_differing, 2)
    assert metrics["seen"] == others["seen"] == 19 and nothing == []
    assert (
        "Counts.summarise differs between ranks, and rank 0's values are used: {'seen': [19.0, 18.0]}"
        in warnings[0]
    )


@pytest.mark.parametrize("columns", [(), (3,)])
def test_regression_metrics(columns: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(17, *columns, generator=generator) * 3 + 50
    outputs = targets + torch.randn(17, *columns, generator=generator)
    task = Regression()
    parts = zip(outputs.split([5, 11, 1]), targets.split([5, 11, 1]), strict=True)
    metrics = task.summarise(torch.stack([task.eval_sums(Given(), part) for part in parts]).sum(0))
    error, target = outputs.double() - targets.double(), targets.double()
    expected = {
        "loss": error.square().mean().item(),
        "rmse": error.square().mean().sqrt().item(),
        "mae": error.abs().mean().item(),
        "r2": 1 - (error.square().sum() / (target - target.mean(0)).square().sum()).item(),
    }
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert set(metrics) == set(task.metric_names)
    column = outputs.reshape(17, -1)  # as a model with a last layer of one unit returns them
    assert task.loss(Given(), (column, targets)).item() == pytest.approx(expected["loss"], rel=1e-6)
    with pytest.raises(UserError, match=r"the model returns 9 numbers; set model.num_classes="):
        task.loss(Given(), (torch.zeros(17, 9), targets))


def test_classification_shows() -> None:
    images = torch.randn(40, 1, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    task, labels = Classification(), torch.arange(40) % 4
    labels[5] = -100
    sums = task.eval_sums(model, (images, labels))
    shown = task.show(model, Evaluation({}, sums, None, (images, labels)))
    confusions = sums[5:].view(4, 4)
    assert confusions.sum() == 39
    assert confusions.trace() == sums[1]
    taken = model(images).argmax(1)
    assert confusions[1, 2] == ((labels == 1) & (taken == 2)).sum()
    assert (
        f"| **1** | {' | '.join(str(int(count)) for count in confusions[1])} |"
        in shown.texts["eval/confusion"]
    )
    picture = shown.images["eval/samples"]
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 4 * (64 + 14), 8 * 64)
    many = nn.Linear(3, 30)
    sums = task.eval_sums(many, (torch.randn(50, 3), torch.zeros(50, dtype=torch.int64)))
    words = task.show(many, Evaluation({}, sums, None, (torch.randn(2, 3), torch.tensor([1, 2]))))
    assert not words.texts and not words.images


def test_language_model_shows() -> None:
    class NextLetter(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert tokens.shape[1] == 8
            return nn.functional.one_hot((tokens + 1) % 256, 256) * 99.0

    tokens = torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.uint8).long()[None]
    state = torch.get_rng_state()
    shown = LanguageModelling(show_tokens=10).show(NextLetter(), Evaluation({}, None, None, (tokens, tokens)))
    assert shown.texts == {"eval/text": "    abcdefgh\n\ncontinues:\n\n    ijklmnopqr"}
    assert torch.equal(state, torch.get_rng_state())
    assert not LanguageModelling(show_tokens=0).show(Given(), Evaluation({}, None, None, (tokens,))).texts
