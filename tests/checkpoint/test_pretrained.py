"""Initial weights: torchvision's by name, other heads, frozen parameters; activations that are computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from models.vision import vision
from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, train
from trainer.config import UnitsConfig
from trainer.errors import UserError
from trainer.loop import fit
from trainer.strategies.units import checkpoint_activations

BACKBONE = (
    "model=resnet18",
    "model.weights=DEFAULT",
    "data=fake",
    "data.dataset.input_shape=[3,64,64]",
    "data.dataset.num_classes=5",
    "data.dataset.num_samples=16",
    "model.freeze=['^(?!fc)']",
    "optim=adamw",
    "train.global_batch_size=4",
    "train.max_steps=1",
    "train.eval_every_epochs=0",
    "checkpoint.every_epochs=null",
)


def _begin_and_end(*overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with context_of(*overrides) as context:
        begin, end = [], []
        for where in (begin, end):
            named = context.state.model.state_dict().items()
            where.append({k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in named})
            if where is begin:
                fit(context)
    return begin[0], end[0]


@pytest.mark.slow
def test_a_frozen_backbone_of_torchvisions_with_another_head(tmp_path: Path) -> None:
    """torchvision's file, simulated: its head has 1000 classes."""
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18().state_dict()
    torch.save(theirs, cache / "resnet18-f37072fd.pth")
    env = {"TORCH_HOME": str(tmp_path)}
    with pytest.raises(RankFailure, match=r"model\.init_ignore=\[fc\] leaves these as initialised"):
        run_ranks(train, 1, *BACKBONE, "strategy=single", f"run_dir={tmp_path / 'head'}", init=False, env=env)
    heads = {}
    for strategy, world in (("single", 1), ("fsdp", 2)):
        options = (
            *BACKBONE,
            f"strategy={strategy}",
            "model.init_ignore=[fc]",
            f"run_dir={tmp_path / strategy}",
        )
        for begin, end in run_ranks(_begin_and_end, world, *options, init=False, env=env):
            assert all(
                begin[name].equal(value) for name, value in theirs.items() if not name.startswith("fc")
            )
            changed = {name for name in begin if not begin[name].equal(end[name])}
            assert changed == {"fc.weight", "fc.bias"}, "running statistics, too, stay"
            heads[strategy] = end["fc.weight"]
    torch.testing.assert_close(heads["fsdp"], heads["single"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_weights_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match="weights=V9 are not known of resnet18; there is IMAGENET1K_V1, DEFAULT"
    ):
        vision("resnet18", (3, 64, 64), 10, weights="V9")
    pretrained: Any = vision("resnet18", (3, 64, 64), 10, weights="DEFAULT").pretrained
    with pytest.raises(
        ValueError, match=r"resnet18-f37072fd\.pth is not there; model\.download=true fetches it"
    ):
        pretrained()


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).tanh()


def test_units_are_computed_twice_and_keep_less() -> None:
    model = nn.Sequential(*[Counted(8, 8) for _ in range(3)])
    kept = [0]

    def count(tensor: Tensor) -> Tensor:
        kept[-1] += tensor.numel()
        return tensor

    results = []
    for turn in range(2):
        if turn:
            assert "3 units" in checkpoint_activations(model, UnitsConfig("x", 10))
        kept.append(0)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(torch.ones(64, 8)).square().sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *results)) and kept[2] < kept[1]
    assert [module.calls for module in model] == [3, 3, 3]
    with pytest.raises(UserError, match="none of its modules has"):
        checkpoint_activations(model, UnitsConfig("x", 1000))
