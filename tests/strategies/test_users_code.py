"""What users' modules and optimizers do late or past torch's parameters counts, or is told, on every rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.faults.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import job_as, settings
from tests.strategies.test_ddp import QUICK
from trainer.loop import fit

OWN = (*QUICK, f"model._target_={__name__}.Late", "train.max_steps=4", "checkpoint.every_steps=2")
STRATEGIES = {
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp", "strategy.unit_min_params=40"),
    "servers": ("strategy=parameter_server", "strategy.servers=all"),
}


class Late(nn.Module):
    """Does in its first forward pass what `how` says."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.is_first, self.layer, self.head = how, True, nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, rows: Tensor) -> Tensor:
        if self.is_first and self.training:
            self.is_first = False
            self.begin(rows)
        rows = self.layer(rows)
        for name, buffer in self.named_buffers():
            rows = rows + buffer * (1 if name == "up" else -3)
        return self.head(rows)

    def begin(self, rows: Tensor) -> None:
        above = bool(rows[0, 0] > 0)  # on one rank of two
        match self.how:
            case "in an order":
                for name in ["up", "down"] if above else ["down", "up"]:
                    self.register_buffer(name, torch.full((6,), 0.1 if name == "up" else 0.2), False)
            case "by data":
                self.register_buffer("up" if above else "down", torch.full((6,), 0.1), False)


@pytest.mark.slow
def test_a_buffer_that_ranks_make_by_their_data_is_refused_with_servers(tmp_path: Path) -> None:
    run = (*OWN, *STRATEGIES["servers"], "+model.how='by data'", f"run_dir={tmp_path}")
    for (found,) in run_ranks(refusals, 2, run, init=False):
        assert "makes or changes down, up: no server" in found


# The same buffers in another order on each rank.
ORDER = (*OWN, "+model.how='in an order'", "train.max_steps=2")


def _buffers(root: Path, words: tuple[str, ...]) -> dict[str, Tensor]:
    with job_as(settings(*ORDER, *words, f"run_dir={root}")) as context:
        fit(context)
        return {name: buffer.clone() for name, buffer in context.state.model.named_buffers()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_are_shared_by_their_names(tmp_path: Path, strategy: str) -> None:
    for found in run_ranks(_buffers, 2, tmp_path, STRATEGIES[strategy], init=False):
        assert found["up"].allclose(torch.tensor(0.1))
        assert found["down"].allclose(torch.tensor(0.2))
