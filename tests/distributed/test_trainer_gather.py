"""`trainer.gather`: the same loss and gradients on several ranks as in one process, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trainer
from tests.ranks import run_ranks
from tests.runs import train
from trainer.data.digits import Digits
from trainer.distributed.gather_samples import gathering
from trainer.errors import UserError

LENGTHS = (3, 1, 4)


def contrast(z: Tensor, others: Tensor, first: int) -> Tensor:
    return F.cross_entropy(z @ others.T, first + torch.arange(len(z)), reduction="sum")


def gradients(inputs: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the loss of this rank's rows, and the gradient of all ranks' losses for these rows."""
    own = inputs.split(lengths)[dist.get_rank()].clone().requires_grad_()
    with gathering(None):
        loss = contrast(own, *trainer.gather(own * 2))
    loss.backward()
    assert own.grad is not None
    return loss.detach(), own.grad


@pytest.mark.parametrize("lengths", [LENGTHS, (2, 2, 2)])
def test_gradients_are_those_of_one_process(lengths: tuple[int, ...]) -> None:
    inputs = torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(0))
    found = run_ranks(gradients, 3, inputs, lengths)
    whole = inputs.clone().requires_grad_()
    loss = contrast(whole, *trainer.gather(whole * 2))
    loss.backward()
    torch.testing.assert_close(sum(loss for loss, _ in found), loss.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), whole.grad)


def of_another_shape() -> str:
    with gathering(None), pytest.raises(UserError) as error:
        trainer.gather(torch.zeros(2, 3 + dist.get_rank()))
    return str(error.value)


def test_rows_of_unequal_shape_are_an_error_on_each_rank() -> None:
    for rank, line in enumerate(run_ranks(of_another_shape, 2)):
        assert f"rows have the shape ({3 + rank},) and torch.float32 on rank {rank}" in line


class TwoViews(Digits):
    """Digits with a second view each, shifted by a pixel."""

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        images, _ = super().__getitems__(indices)
        return images, images.roll(1, dims=-1)


class Pairs:
    """SimCLR: identify the other view of the same sample among all views of the batch."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = F.normalize(model(torch.cat(batch)), dim=1)
        one, two = z.chunk(2)
        (ones, first), (twos, _) = trainer.gather(one), trainer.gather(two)
        wanted = first + torch.arange(len(one))
        scores = [torch.cat([mine @ other.T, mine @ same.T], 1) / 0.2 for mine, other, same in
                  ((one, twos, ones), (two, ones, twos))]  # fmt: skip
        itself = torch.cat([torch.zeros(len(one), len(ones)), F.one_hot(wanted, len(ones))], 1).bool()
        return sum(F.cross_entropy(s.masked_fill(itself, -1e9), wanted) for s in scores) / 2  # type: ignore[return-value]

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch).double().view(1)

    def summarise(self, sums: Tensor) -> dict[str, float]:
        return {"loss": float(sums)}


RUN = (
    *("logger=jsonl", "train.max_steps=5", "train.log_every_steps=1", "schedule=constant", "data=own"),
    *("data.dataset._target_=tests.distributed.test_trainer_gather.TwoViews", "model.hidden=[16]"),
    *("data.task._target_=tests.distributed.test_trainer_gather.Pairs", "checkpoint.every_epochs=null"),
)


def losses(run_dir: Path, *overrides: str) -> tuple[list[float], str]:
    try:
        train(*RUN, *overrides, f"run_dir={run_dir}")
    except UserError as error:
        return [], str(error)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line], ""


@pytest.mark.slow
def test_simclr_has_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    plain = "train.eval_every_epochs=0"
    ways = {"single": 1, "ddp-2": 2, "ddp-4": 4, "fsdp-2": 2}
    found = {}
    for way, world in ways.items():
        strategy = f"strategy={way.partition('-')[0]}"
        found[way] = run_ranks(losses, world, tmp_path / way, strategy, plain, init=False)[0][0]
        assert found[way] == pytest.approx(found["single"], abs=1e-6) and len(found[way]) == 5
    assert found["single"][-1] < found["single"][0]


def refused(run_dir: Path) -> list[str]:
    ways = (["train.micro_batch_size=16"], ["train.exact=4"], [])
    return [losses(run_dir / str(number), *way)[1] for number, way in enumerate(ways)]


def test_settings_that_would_change_the_loss_raise_one_line(tmp_path: Path) -> None:
    parts, exact, evaluated = run_ranks(refused, 1, tmp_path, init=False)[0]
    assert "has 4 micro-batches on each rank" in parts and "train.exact=4 computes" in exact
    assert "return the embeddings from Task.rows" in evaluated
    assert all(line.startswith("trainer.gather: ") and "\n" not in line for line in (parts, exact, evaluated))
