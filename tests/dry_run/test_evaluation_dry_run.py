"""Mistakes in an evaluation are found before the first step, by a dry run without side effects."""

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.runs import context_of
from tests.user_parts import Normed, Stripes
from trainer.dry_run import evaluation as tried
from trainer.errors import UserError
from trainer.evaluation import evaluate
from trainer.tasks import Classification
from trainer.tensors.local_shard import is_dtensor

PARTS = (
    *(f"model._target_={__name__}.Generates", "~model.input_shape", "~model.hidden", "~model.num_classes"),
    *(f"data.dataset._target_={__name__}.Held", f"data.task._target_={__name__}.Fails"),
    *("~data.task.label_smoothing", "train.global_batch_size=16", "strategy.unit_min_params=20"),
)


class Held(Stripes):
    def __init__(self, split: str, readable: bool = True) -> None:
        super().__init__(split)
        self.readable = readable or split == "train"

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not self.readable:
            raise OSError("truncated")
        return super().__getitem__(index)


class Generates(Normed):
    def generate(self, rows: Tensor) -> Tensor:
        """Use two modules, and make more passes on rank 1, as if its texts were longer."""
        state = next(self.parameters()).new_zeros(len(rows), 1)
        for _ in range(2 + torch.distributed.get_rank()):
            state = state + self(rows).sum(1, keepdim=True)
        return state * 0 + self.layers(rows)


class Fails(Classification):
    metric_names = ()

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.seen = how, torch.zeros(1)

    def eval_sums(self, model: Any, batch: Any) -> Tensor:
        self.seen += len(batch[1])
        random.random()
        match self.how:
            case "field":
                return super().eval_sums(model, batch[2])
            case "shape":
                return super().eval_sums(model, (batch[0][:, 1:], batch[1]))
            case "generate":
                return super().eval_sums(model.generate, batch)
        model.train()(batch[0] + torch.rand(1))  # changes running statistics
        return super().eval_sums(model.eval(), batch)

    def summarise(self, sums: Tensor) -> dict[str, float]:
        if self.how == "name":
            return unknown(sums)  # type: ignore[name-defined]  # noqa: F821
        if self.how == "few" and sums[-1] < 100:
            raise ValueError("only one class")
        return super().summarise(sums)


def _message_of(run_dir: str, *words: str) -> str:
    """Return the message of a dry run about a mistake; "" if there is none and nothing has changed."""
    warnings = list[str]()
    tried.log.warning = lambda text, *parts: warnings.append(text % parts)  # type: ignore[method-assign]
    with context_of(*PARTS, *words, f"run_dir={run_dir}") as run:
        generators = random.getstate(), torch.get_rng_state().tolist()
        buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        try:
            tried.dry_run_of_evaluation(run)
        except UserError as error:
            return str(error)
        assert generators == (random.getstate(), torch.get_rng_state().tolist())
        assert all(torch.equal(buffers[name], buffer) for name, buffer in run.model.named_buffers())
        assert not run.task.seen  # type: ignore[attr-defined]
        return "".join(warnings)


def _all_messages(run_dir: str, *words: tuple[str, ...]) -> list[str]:
    return [_message_of(run_dir, *each) for each in words]


@pytest.mark.slow
def test_mistakes_are_found_before_the_first_step(tmp_path: Any) -> None:
    how = "+data.task.how={}".format
    expected = {
        ("data.num_workers=2",): r"",
        (
            how("field"),
        ): r"Fails fails on the first validation batch, in the dry run .*: IndexError: .*set train.eval_every_epochs=0",
        (how("shape"),): r"RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        (how("name"),): r"NameError: name 'unknown' is not defined",
        (
            how("few"),
        ): r"Fails.summarise raised ValueError: only one class. .* the run stops at the first evaluation",
        ("+data.dataset.readable=false",): r"sample 0 .* cannot be read: truncated",
        ("checkpoint.keep_best={metric: eval/f1, mode: max}",): r"metric=eval/f1 is not .* eval/loss",
        ("+data.dataset.readable=false", "train.eval_every_epochs=0"): r"",
    }
    (found,) = run_ranks(_all_messages, 1, str(tmp_path), *expected, init=False)
    for words, message in zip(expected.values(), found, strict=True):
        assert re.search(words, message) if words else not message, message


def _generated(run_dir: str, strategy: str) -> list[Any]:
    """Return the message of a dry run without gathering, and the metrics with; rank 1 makes one more pass."""
    words, gathers = (
        ("+data.task.how=generate", f"strategy={strategy}"),
        "strategy.gather_for_evaluation=true",
    )
    message = _message_of(run_dir, *words)
    with context_of(*PARTS, *words, *[gathers] * (strategy == "fsdp"), f"run_dir={run_dir}") as run:
        assert run.data.eval_loader is not None
        metrics = [evaluate(run.model_context, run.data.eval_loader).metrics for _ in range(2)]
        assert metrics[0] == metrics[1]
        assert strategy != "fsdp" or all(is_dtensor(parameter) for parameter in run.model.parameters())
    return [message, metrics[0]["loss"]]


@pytest.mark.slow
def test_a_model_generates_under_fsdp_if_it_is_gathered(tmp_path: Any) -> None:
    (alone,) = run_ranks(_generated, 1, str(tmp_path), "single", init=False)
    for message, loss in run_ranks(_generated, 2, str(tmp_path), "fsdp", init=False):
        assert (
            "generate() or encode(). Outside forward(), they are sharded; set strategy.gather_for_evaluation=true"
            in message
        )
        assert loss == pytest.approx(alone[1], rel=1e-5)
    assert not alone[0]
