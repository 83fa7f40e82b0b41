"""A user's own module and YAML: dict batches, transforms, a metric from rows, a picture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.ranks import run_ranks
from tests.runs import train
from trainer.tasks import Evaluation, Shown
from trainer.tasks.ranking import auc


class Photos(Dataset[dict[str, Any]]):
    """Bytes in nested dicts; the brighter half of a picture is its left or its right."""

    num_classes, mean, std = 2, (0.5,), (0.25,)

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.images = torch.randint(256, (53, 1, 8, 8), generator=generator, dtype=torch.uint8)
        self.labels = torch.arange(53) % 2
        self.images[self.labels == 1, :, :4] //= 2  # the upper half, so that mirroring takes nothing away

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "target": {"label": self.labels[index]}, "id": index}


class Own:
    """A task without a base class, with only the methods that it uses."""

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["target"]["label"])

    def rows(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        logits = model(batch["image"])
        label = batch["target"]["label"]
        loss = F.cross_entropy(logits, label, reduction="none")
        return {"id": batch["id"], "loss": loss, "score": logits[:, 1] - logits[:, 0], "label": label == 1}

    def summarise_rows(self, rows: dict[str, Tensor]) -> dict[str, float]:
        assert rows["id"].tolist() == list(range(53))
        return {"loss": rows["loss"].mean(), "auc": auc(rows["score"], rows["label"])}  # type: ignore[dict-item]

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        from matplotlib.figure import Figure

        torch.rand(3)  # leaves no trace in the run
        mean = model(evaluation.batch["image"]).mean().item()
        return Shown({"own/text": f"{mean:.2f}"}, figures={"own/figure": Figure})


OWN = (
    "model=mlp",
    "model.hidden=[16]",
    "data=digits",
    "data.dataset._target_=tests.data.test_own_data.Photos",
    "data.task._target_=tests.data.test_own_data.Own",
    "~data.task.label_smoothing",
    "data.images.flip=true",
    "data.train_transforms=[{_target_:torchvision.transforms.v2.RandomCrop,size:8,padding:1}]",
    "train.global_batch_size=12",
    "train.epochs=6",
    "train.log_every_steps=1",
    "train.eval_every_epochs=2",
    "checkpoint.keep_best={metric: eval/auc, mode: max}",
)


@pytest.mark.slow
def test_what_one_brings(tmp_path: Path) -> None:
    """Under each strategy the same samples, mirrored and cropped equally, and so the same model."""
    alone, *others = [
        run_ranks(_trained, world_size, (f"strategy={name}", f"run_dir={tmp_path / name}", *OWN), init=False)[
            0
        ]
        for name, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2))
    ]
    assert alone["eval/auc"] > 0.9
    for result in others:
        assert result["eval/auc"] == pytest.approx(alone["eval/auc"], abs=2e-3)
        assert result["eval/loss"] == pytest.approx(alone["eval/loss"], rel=1e-4)
        assert result["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-4)
    for name in ("single", "ddp", "fsdp"):
        events = b"".join(file.read_bytes() for file in (tmp_path / name / "tensorboard").iterdir())
        assert b"own/text" in events and b"own/figure" in events


def _trained(overrides: tuple[str, ...]) -> dict[str, Any]:
    return train(*overrides)
