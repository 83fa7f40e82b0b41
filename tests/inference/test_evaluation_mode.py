"""Evaluation restores train/eval modes, including what `train()` does and flags that a model sets itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import runs
from trainer import api
from trainer.evaluation import evaluation_mode


class Merging(nn.Module):
    """Like LoRA, with a `train` that returns nothing.

    In evaluation mode, a product of two small matrices is added to the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(64)
        self.down, self.up = nn.Parameter(torch.randn(2, 64)), nn.Parameter(torch.randn(10, 2))
        self.merged = False

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        if self.merged == mode:
            self.base.weight.data += (self.up @ self.down).detach() * (-1 if mode else 1)
            self.merged = not mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.flatten(1))
        added = 0 if self.merged else x @ (self.up @ self.down).T
        return self.base(x) + added


def test_modes_are_restored() -> None:
    model = nn.Sequential(Merging(), nn.Dropout())
    merging = model[0]
    assert isinstance(merging, Merging)
    merging.norm.eval()
    weight = merging.base.weight.detach().clone()
    with evaluation_mode(model):
        assert not model[1].training and not merging.base.weight.equal(weight)
    assert model.training and model[1].training and not merging.norm.training
    torch.testing.assert_close(merging.base.weight, weight)
    model.eval()
    with evaluation_mode(model):
        pass
    assert not model.training and not model[1].training


@pytest.mark.slow
def test_a_checkpoint_saved_after_an_evaluation_is_in_training_mode(tmp_path: Path) -> None:
    settings = ["model._target_=tests.inference.test_evaluation_mode.Merging", "~model.input_shape"]
    settings += ["~model.num_classes", "~model.hidden", "train.max_steps=8", "train.eval_every_steps=2"]
    settings += ["checkpoint.every_steps=2", "checkpoint.every_epochs=null"]
    whole, resumed = runs.whole_and_resumed(tmp_path, 6, "logger=jsonl", *settings)
    assert whole == resumed
    assert isinstance(model := api.load_model(tmp_path / "whole"), Merging) and not model.training
    assert isinstance(api.open(tmp_path / "whole").model, Merging)
