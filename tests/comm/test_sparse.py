"""Sparse gradients: `native` supports them with the timeline on; all others name the parameter beforehand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import runs
from tests.ranks import run_ranks
from trainer.comm.ddp_hook import attach
from trainer.comm.timeline.summary import table
from trainer.errors import UserError


class Words(nn.Module):
    """Looks up words with a module that declares sparse gradients or, `unforeseen`, without DDP's knowledge."""

    def __init__(self, num_classes: int = 10, unforeseen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(17, 8, sparse=not unforeseen), nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (16 * x.flatten(1)).long().clamp(0, 16)
        return self.head(nn.functional.embedding(words, self.words.weight, sparse=True).mean(1))


def backward(model: nn.Module, step: int) -> torch.Tensor:
    """The gradients of both layers; other words, and another number of them, on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    model.zero_grad()
    model(torch.rand(2 + step, 3 + dist.get_rank(), generator=generator)).pow(2).sum().backward()
    return torch.cat([p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None])


def carry(wire_dtype: str) -> dict[str, Any]:
    plain, model = DistributedDataParallel(Words()), DistributedDataParallel(Words())
    hook = attach(model, "native", hosts=[0, 0], wire_dtype=wire_dtype, timeout_s=20.0)
    for step in range(5):
        expected, found = backward(plain, step), backward(model, step)
        torch.testing.assert_close(found, expected, rtol=2e-2 if wire_dtype == "bf16" else 0, atol=1e-2)
    metrics = hook.timeline.metrics()
    unforeseen = DistributedDataParallel(Words(unforeseen=True))
    with (
        pytest.raises(RuntimeError) as late,
        attach(unforeseen, "ring", hosts=[0, 0], timeout_s=20.0).plain_errors(),
    ):
        backward(unforeseen, 0)
    refused = {"ring, at the first step": str(late.value)}
    for algorithm in ("ring", "powersgd"):
        with pytest.raises(ValueError) as error:
            attach(DistributedDataParallel(Words()), algorithm, hosts=[0, 0])
        refused[algorithm] = str(error.value)
    return {"table": table(hook.timeline), "megabytes": metrics["comm/megabytes"], "refused": refused}


@pytest.mark.parametrize("wire_dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_native_carries_them_and_the_others_name_the_parameter(wire_dtype: str) -> None:
    for rank, found in enumerate(run_ranks(carry, 2, wire_dtype)):
        words = 6 * (3 + rank)  # of the last step, each with an index of 8 bytes and 8 values of 4
        assert found["megabytes"] == pytest.approx((words * (8 + 8 * 4) + (8 * 10 + 10) * 4) / 1e6)
        rows = found["table"].splitlines()[1:-2]
        assert len(rows) <= 4, "a row for each number of words would fill the memory in a month"
        for algorithm, message in found["refused"].items():
            assert "words.weight" in message, f"{algorithm}: {message}"


def train(run_dir: str, *overrides: str) -> dict[str, Any]:
    model = ["model._target_=tests.comm.test_sparse.Words", "~model.hidden", "~model.input_shape"]
    few = ["train.log_every_steps=1", "seed=0", "optim=sgd", "optim.weight_decay=0"]
    return runs.train("strategy=ddp", f"run_dir={run_dir}", *model, *few, *overrides)


def train_and_go_on(run_dir: str) -> dict[str, Any]:
    train(run_dir, "train.max_steps=2")
    return train(run_dir, "train.max_steps=3", "resume=auto")


def refuse(run_dir: str) -> str:
    with pytest.raises(UserError) as error:
        train(run_dir, "comm=ring")
    return str(error.value)


@pytest.mark.slow
def test_a_run_trains_them_at_the_defaults_and_refuses_a_schedule_before_the_first_step(
    tmp_path: Any,
) -> None:
    with pytest.raises(UserError, match=r"SGD with weight_decay takes no sparse gradients, but words.weight"):
        train(str(tmp_path / "decay"), "optim.weight_decay=0.1")
    for result in run_ranks(train_and_go_on, 2, str(tmp_path / "native"), init=False):
        assert result["steps"] == 3
    for message in run_ranks(refuse, 2, str(tmp_path / "ring"), init=False):
        assert message.startswith("comm=ring: ring adds up dense gradients") and "words.weight" in message
