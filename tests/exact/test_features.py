"""Features that work with train.exact: single, ddp and fsdp end with the same hash."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exact.matrix import COMMON, MODELS, NOISY, OPTIMIZERS, figures, refused_each
from tests.ranks import run_ranks
from tests.runs import context_of
from trainer.failures.heartbeat import Records
from trainer.loop import fit

MLP = (*MODELS["mlp"], *OPTIMIZERS["adamw"], "train.max_steps=4")
FEATURES = (
    *('optim.groups=[{match: "^(second|head)", weight_decay: 0, lr_scale: 10}]', "ema.decay=0.9"),
    *('model.freeze=["^first"]', "strategy.activation_checkpointing=true"),
)


def _found(tmp_path: Path, *words: str) -> tuple[list[Any], list[Any]]:
    """Return the results of single and fsdp on one rank, and of ddp and fsdp on two."""
    one, two = (
        figures(tmp_path / str(world), world, *((*MLP, *words, f"strategy={name}") for name in names))
        for world, names in ((1, ("single", "fsdp")), (2, ("ddp", "fsdp")))
    )
    return one, two


@pytest.mark.slow
def test_groups_averages_frozen_parameters_and_checkpointed_activations_have_one_hash(tmp_path: Path) -> None:
    one, two = _found(tmp_path, *FEATURES)
    assert len({*one, *two}) == 1, (one, two)


@pytest.mark.slow
def test_in_bf16_shards_have_one_hash_and_whole_models_another(tmp_path: Path) -> None:
    """fsdp computes with parameters in bf16, and autocast casts them op by op: the start-up reports both."""
    one, two = _found(tmp_path, "train.precision=bf16")
    assert one == two


class Following(nn.Module):
    """Classifies rows (B, 6); a running mean is updated as `how` specifies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.zeros(()))
        self.teacher = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            mean = rows.mean(dim=0)
            if self.how == "later" and self.passes > 6:
                self.mean.mul_(0.9).add_(0.1 * mean)
            elif self.how == "late" and self.passes > 2 and not hasattr(self, "made"):
                self.register_buffer("made", mean, persistent=False)
            elif self.how == "frozen":
                with torch.no_grad():
                    self.teacher.lerp_(mean, 0.1)
        return self.layer(rows - self.mean - self.teacher)


FOLLOWING = (
    *("data.dataset._target_=tests.user_parts.Stripes", f"model._target_={__name__}.Following"),
    *("~model.input_shape", "~model.hidden", "~model.num_classes", "train.global_batch_size=16"),
    *(*OPTIMIZERS["sgd"], "train.max_steps=12"),
)


@pytest.mark.slow
def test_losses_without_a_mean_over_chunks_are_refused(tmp_path: Path) -> None:
    expected = {
        "late": "a step created the buffer made, which is not averaged over chunks",
        "later": "the buffer mean changes, but did not change in the dry run before the first step",
        "frozen": "the forward or backward pass changes teacher",
    }
    each = [
        (*FOLLOWING, "strategy=single", "train.exact=2", f"+model.how={how}", f"run_dir={tmp_path / how}")
        for how in expected
    ]
    messages = run_ranks(refused_each, 1, *each, init=False)[0]
    assert all(words in one for one, words in zip(messages, expected.values(), strict=True)), messages


@pytest.mark.slow
def test_easily_missed_features_have_one_hash(tmp_path: Path) -> None:
    """The buffer is changed through `.data`."""
    words = (*NOISY, *OPTIMIZERS["sgd"], "train.max_steps=8", "model._target_=tests.exact.odd_parts.Codebook")
    alone = figures(tmp_path / "1", 1, (*words, "strategy=single"))
    assert figures(tmp_path / "2", 2, (*words, "strategy=ddp")) == alone


@pytest.mark.slow
def test_layers_that_some_chunks_skip_have_one_hash(tmp_path: Path) -> None:
    """Also a parameter that only chunks before the last one of each rank have used."""
    words = (*NOISY, *OPTIMIZERS["adamw"], "model._target_=tests.exact.odd_parts.SkipsLayers")
    ddp = (*words, "strategy=ddp", "comm=ring", "strategy.find_unused_parameters=true")
    found = figures(tmp_path / "1", 1, (*words, "strategy=single"))
    found += figures(tmp_path / "2", 2, ddp) + figures(tmp_path / "3", 3, ddp)
    assert len(set(found)) == 1, found


def _positions(*overrides: str) -> int:
    with context_of(*overrides) as context:
        fit(context)
        return Records(context.ranks.heartbeat._memory).main().position


@pytest.mark.slow
def test_ranks_with_fewer_chunks_enter_the_same_phases(tmp_path: Path) -> None:
    """A report names the rank that entered the fewest phases."""
    words = (*COMMON, *MLP, "strategy=ddp", f"run_dir={tmp_path}")
    assert len(set(run_ranks(_positions, 3, *words, init=False))) == 1
