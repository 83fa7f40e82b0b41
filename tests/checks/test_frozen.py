"""Parameters that user code thaws or freezes in mid-run: the rest trains as before, and it is told once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import runs
from tests.ranks import run_ranks
from trainer.checks.frozen import Frozen


class Thaws(nn.Module):
    """Digits; a layer that is frozen, and that the third pass thaws on request."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 10)
        self.thaws, self.passes = thaws, 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.layer.requires_grad_(self.thaws and self.passes >= 3)
        return self.head(torch.tanh(self.layer(images.flatten(1))))


def _thawing(root: str) -> list[str]:
    """The hashes of a model without and with a thawed layer."""
    options = ("logger=jsonl", "optim=sgd", "train.max_steps=6", "train.clip_grad_norm=0.01")
    options += ("model._target_=tests.checks.test_frozen.Thaws", "train.eval_every_epochs=0")
    options += ("~model.input_shape", "~model.hidden", "~model.num_classes", "data=digits")
    return [
        runs.train(*options, f"+model.thaws={thaws}", f"run_dir={root}/{thaws}")["param_sha256"]
        for thaws in (False, True)
    ]


@pytest.mark.slow
def test_what_is_thawed_in_mid_run_leaves_the_rest_alone(tmp_path: Path) -> None:
    frozen, thawed = run_ranks(_thawing, 2, str(tmp_path), init=False)[0]
    assert frozen == thawed


def test_what_is_thawed_or_frozen_in_mid_run_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Thaws(thaws=True)
    begun = Frozen(model)
    for _ in range(4):
        model(torch.ones(2, 64)).sum().backward()
        begun.drop_gradients()
        assert model.layer.weight.grad is None
    model.head.requires_grad_(False)
    for _ in range(2):
        begun.drop_gradients()
    thawed, frozen = (record.getMessage() for record in caplog.records)
    assert thawed.startswith("layer.weight (and 1 more) was frozen when the run began and now requires a gr")
    assert frozen.startswith("head.weight (and 1 more) was trained when the run began and now requires no gr")
