"""comm=hook runs any communication hook of DDP by its `_target_`; sparse gradients are an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.runs import context_of, train, trained
from trainer.errors import UserError
from trainer.strategies.ddp_comm import users_hook

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
BF16 = ("comm=hook", f"comm.hook._target_={_HOOKS}.default_hooks.bf16_compress_hook")
POWERSGD = (
    *("comm=hook", f"comm.hook._target_={_HOOKS}.powerSGD_hook.powerSGD_hook"),
    f"+comm.hook.state={{_target_:{_HOOKS}.powerSGD_hook.PowerSGDState,process_group:null,"
    "matrix_approximation_rank:1,start_powerSGD_iter:2}",
)
SHORT = ("strategy=ddp", "logger=jsonl", "train.max_steps=8", "checkpoint.every_epochs=null")


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(17, 8, sparse=True), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((16 * x.flatten(1)).long().clamp(0, 16)).mean(1))


WORDS = ("model._target_=tests.strategies.test_comm_hook.Words", "~model.hidden", "~model.input_shape")


def hooked(run_dir: str) -> dict[str, Any]:
    """Return weights with native, bf16 and PowerSGD, the notes of the last, and the error of a bad target."""
    found: dict[str, Any] = {}
    for name, words in {"native": ("comm=native",), "bf16": BF16, "powersgd": POWERSGD}.items():
        found[name] = trained(*SHORT, *words, f"run_dir={run_dir}/{name}")
    with context_of(*SHORT, *POWERSGD, f"run_dir={run_dir}/notes") as context:
        found["notes"] = list(context.strategy.notes)
        with pytest.raises(UserError) as error:
            context.strategy.wrap(Words())
        found["sparse"] = str(error.value)
    with pytest.raises(UserError) as error:
        users_hook({"_target_": "torch.nope"})
    found["bad"] = str(error.value)
    sparse = (*SHORT, *WORDS, "optim.momentum=0", "optim.weight_decay=0", f"run_dir={run_dir}/words")
    return found | {"words": train(*sparse)["comm"]}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


@pytest.mark.slow
def test_a_hook_reduces_gradients_and_unsupported_uses_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(hooked, 2, str(tmp_path), init=False)
    start = trained(*SHORT[1:], "train.max_steps=1", "optim.lr=1e-9", f"run_dir={tmp_path}/start")
    moved = distance(first["native"], start)
    assert 0 < distance(first["bf16"], first["native"]) < 0.01 * moved
    assert 0.001 * moved < distance(first["powersgd"], first["native"]) < 0.7 * moved
    for name in ("native", "bf16", "powersgd"):
        assert distance(first[name], second[name]) == 0
    assert sum("checkpoints do not contain the hook's state" in note for note in first["notes"]) == 1
    for found in (first, second):
        assert found["bad"].startswith("comm.hook: torch.nope cannot be built: ") and "\n" not in found["bad"]
        assert found["sparse"].startswith(
            "comm=hook supports only dense gradients, but those of words.weight are"
        )
        assert found["words"] == "native", "by DDP itself"
