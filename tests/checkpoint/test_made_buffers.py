"""Buffers that a forward pass makes or replaces are resumed, evaluated and loaded as they were saved."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.faults.test_ends import TINY
from tests.ranks import run_ranks
from tests.runs import train
from trainer import api


class Whitened(nn.Module):
    """Buffers that begin as one tensor, are replaced in each pass, and one that the first pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        begin, seen = torch.zeros(6), torch.zeros(1)
        for name, value in (("mean", begin), ("square", begin), ("seen", seen), ("seen_too", seen)):
            self.register_buffer(name, value, persistent=name == "mean")

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0), persistent=False)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.square = 0.9 * self.square + 0.1 * x.detach().square().mean(0)
            self.seen += 1
        assert self.seen_too == self.seen
        return self.layer((x - self.mean - self.first) / (self.square + 0.1))


QUICK = (
    *(*TINY, "schedule=constant", "train.log_every_steps=1", "train.eval_every_epochs=0"),
    *("checkpoint.every_steps=2", "train.max_steps=4", f"model._target_={__name__}.Whitened"),
)


def resumed(tmp_path: Path, *strategy: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The hashes of a run's model, whole and resumed; and the buffers of the whole one, loaded."""
    whole, again = (tmp_path / name for name in ("whole", "again"))
    runs = {"whole": train(*QUICK, *strategy, f"run_dir={whole}")}
    middle = f"resume={whole}/checkpoints/step_00000002"
    runs["again"] = train(*QUICK, *strategy, f"run_dir={again}", middle)
    loaded = dict(api.load_model(whole, "newest").named_buffers(remove_duplicate=False))
    return {name: str(run["param_sha256"]) for name, run in runs.items()}, loaded


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_resume_has_them_as_they_were_saved(tmp_path: Path, strategy: str) -> None:
    world_size = 1 if strategy == "single" else 2
    hashes, loaded = run_ranks(resumed, world_size, tmp_path, f"strategy={strategy}", init=False)[0]
    assert hashes["whole"] == hashes["again"]
    assert loaded.keys() == {"mean", "square", "seen", "seen_too", "first"}
    assert not loaded["mean"].equal(loaded["square"]) and loaded["first"].any()
    loaded["seen"] += 1
    assert loaded["seen_too"] == 5  # one tensor still
