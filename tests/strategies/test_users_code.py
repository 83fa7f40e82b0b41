"""What users' modules and optimizers do late or past torch's parameters counts, or is told, on every rank."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.faults.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import job_as, settings, train
from tests.strategies.test_ddp import QUICK
from trainer.errors import UserError
from trainer.loop import fit
from trainer.strategies.data_parallel import to_gather

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
        if how == "views":
            self.views = [self.layer.weight.detach().t()]
        if how == "unused view":
            self.view: Tensor | None = self.layer.weight.detach()

    def forward(self, rows: Tensor) -> Tensor:
        if self.is_first and self.training:
            self.is_first = False
            self.begin(rows)
        if self.how == "views":
            rows = rows @ self.views[0]
        rows = self.layer(rows)
        for name, buffer in self.named_buffers():
            rows = rows + buffer * (1 if name == "up" else -3)
        return self.head(rows)

    def begin(self, rows: Tensor) -> None:
        above = bool(rows[0, 0] > 0)  # on one rank of two
        match self.how:
            case "accumulated":
                self.layer.weight.register_post_accumulate_grad_hook(_tenth)
            case "clamped":
                self.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
            case "in an order":
                for name in ["up", "down"] if above else ["down", "up"]:
                    self.register_buffer(name, torch.full((6,), 0.1 if name == "up" else 0.2), False)
            case "by data":
                self.register_buffer("up" if above else "down", torch.full((6,), 0.1), False)
            case "unused view":
                self.view = None


def _tenth(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


def outcomes(root: Path, strategy: tuple[str, ...]) -> dict[str, str]:
    """What each run ends with, or what was warned."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer.checks").addHandler(handler)
    found = {}
    for how in ("views", "unused view", "accumulated", "clamped", "by data"):
        said.clear()
        words = (*OWN, *strategy, f"+model.how='{how}'", f"run_dir={root / how.replace(' ', '_')}")
        found[how] = " ".join([*refusals(words), *said])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_begins_late_is_refused_or_told(tmp_path: Path, strategy: str) -> None:
    own = "ddp: hooks on the gradients of layer.weight get each rank's own"
    fsdp = "UserError: strategy=fsdp: the forward pass registers hooks on the gradients of layer.weight"
    expected = {
        "ddp": {"views": "accepted", "accumulated": own, "clamped": own},
        "fsdp": {
            "views": "UserError: strategy=fsdp: views is a view of a trained",
            "accumulated": fsdp,
            "clamped": fsdp,
        },
        "servers": {
            "views": "accepted",
            "accumulated": "accepted",
            "clamped": "accepted",
            "by data": "makes or changes down, up: no server",
        },
    }[strategy]
    expected = {"unused view": "accepted", "by data": "differs from rank 0 in the buffer"} | expected
    for found in run_ranks(outcomes, 2, tmp_path, STRATEGIES[strategy], init=False):
        for how, words in expected.items():
            assert words in found[how], f"{how}: {found[how]}"


def _whole_and_resumed(root: Path) -> list[str]:
    words = (*OWN, "strategy=ddp", "+model.how=accumulated")
    whole = train(*words, f"run_dir={root / 'whole'}")
    middle = root / "whole" / "checkpoints" / "step_00000002"
    again = train(*words, f"run_dir={root / 'again'}", f"resume={middle}")
    return [whole["param_sha256"], again["param_sha256"]]


@pytest.mark.slow
def test_a_resumed_ddp_reduces_what_a_late_hook_made_of_a_gradient(tmp_path: Path) -> None:
    whole, again = run_ranks(_whole_and_resumed, 2, tmp_path, init=False)[0]
    assert whole == again


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


def test_dp_cannot_gather_a_loss_without_dimensions() -> None:
    assert to_gather({"logits": torch.zeros(2, 3), "loss": None})
    with pytest.raises(UserError, match="returns a tensor without dimensions"):
        to_gather({"logits": torch.zeros(2, 3), "loss": torch.zeros(())})
