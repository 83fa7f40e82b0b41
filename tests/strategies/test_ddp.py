"""Gradients that DDP cannot reduce are named before an update uses them."""

import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor, nn

from tests.failures.test_ends import TINY, refusals
from tests.programs import finish_ranks
from tests.ranks import run_ranks
from trainer.tasks import Classification

QUICK = (
    *(word for word in TINY if not word.startswith("model._target_")),
    "train.max_steps=3",
    "train.eval_every_epochs=0",
)
WAY_OUT = r"DDP waits for the gradient of every parameter; set strategy\.find_unused_parameters=true"


class Idle(nn.Module):
    """Skips a layer on `ranks` from the fifth pass on, including the dry run; never uses `spare`."""

    def __init__(self, ranks: str = "01", spare: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 2)
        self.ranks, self.spare = ranks, nn.Linear(6, 6) if spare else None
        self.passes = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += self.training
        leaves_out = self.passes > 4 and os.environ["RANK"] in self.ranks
        for layer in self.layers[leaves_out:]:
            rows = layer(rows)
        return self.head(rows)


class Parts(Classification):
    """Calls a submodule of the model, or uses the model as a container."""

    def __init__(self, label_smoothing: float = 0.0, how: str = "") -> None:
        super().__init__(label_smoothing)
        self.how = how

    def loss(self, model: Any, batch: Any) -> Tensor:
        if self.how == "index":
            return cast(Tensor, model[0](batch[0]).sum())
        return cast(Tensor, model.head(batch[0]).sum() if self.how != "len" else len(model))


def idle(*options: str) -> tuple[str, ...]:
    return (*QUICK, "model._target_=tests.strategies.test_ddp.Idle", *options)


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_named(tmp_path: Path) -> None:
    spare = "did not use spare.weight, spare.bias, but " + WAY_OUT
    layer = r"did not use (layers\.0\.weight, layers\.0\.bias|all parameters), but " + WAY_OUT
    expected = {
        # The last step, for which DDP raises no error, and the second of two micro-batches.
        idle("+model.spare=true", "train.max_steps=1"): spare,
        idle("+model.spare=true", "comm.timeline=false"): spare,
        idle("train.micro_batch_size=6"): layer,
        idle("train.micro_batch_size=6", "strategy.gradient_as_bucket_view=false"): layer,
        idle(
            "train.micro_batch_size=6", "strategy.static_graph=true"
        ): "not supported with several micro-batches",
        idle("+model.spare=true", "strategy.find_unused_parameters=true"): "accepted",
        idle(
            f"data.task._target_={__name__}.Parts"
        ): r"the loss uses model\.head, but .* the model itself is called",
        idle(
            f"data.task._target_={__name__}.Parts", "+data.task.how=index"
        ): r"the loss uses model\[\.\.\.\]",
        idle(f"data.task._target_={__name__}.Parts", "+data.task.how=len"): r"or similar, but gradients",
    }
    mistakes = [(*options, f"run_dir={tmp_path}/{number}") for number, options in enumerate(expected)]
    for rank, messages in enumerate(run_ranks(refusals, 2, *mistakes, init=False)):
        for message, words in zip(messages, expected.values(), strict=True):
            assert re.search(words, message), message
            assert words != layer or f"the loss of rank {rank} " in message


@pytest.mark.slow
def test_a_parameter_unused_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    ended = finish_ranks(2, "train.py", *idle("train.max_steps=5", "+model.ranks='1'", f"run_dir={tmp_path}"))
    assert [rank.code for rank in ended] == [2, 2]
    output = "".join(rank.output for rank in ended)
    assert re.search(
        r"the loss of rank 1 did not use layers\.0\.weight, layers\.0\.bias, but " + WAY_OUT, output
    )
