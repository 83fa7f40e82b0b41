"""Initial weights: torchvision's by name, new heads, frozen parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor

from models.vision import vision
from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, train
from trainer.loop import fit

BACKBONE = (
    "model=vision",
    "model.name=shufflenet_v2_x0_5",
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
def test_a_frozen_torchvision_backbone_with_a_new_head(tmp_path: Path) -> None:
    """torchvision's file is simulated: its head has 1000 classes."""
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.manual_seed(3)
    theirs = torchvision.models.shufflenet_v2_x0_5().state_dict()
    torch.save(theirs, cache / "shufflenetv2_x0.5-f707e7126e.pth")
    env = {"TORCH_HOME": str(tmp_path)}
    with pytest.raises(RankFailure, match=r"model\.init_ignore=\[fc\] to keep their initial values"):
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
def test_missing_pretrained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="weights=V9: expected one of IMAGENET1K_V1, DEFAULT for resnet18"):
        vision("resnet18", (3, 64, 64), 10, weights="V9")
    pretrained: Any = vision("resnet18", (3, 64, 64), 10, weights="DEFAULT").pretrained
    with pytest.raises(
        ValueError, match=r"resnet18-f37072fd\.pth does not exist; set model\.download=true to download it"
    ):
        pretrained()
