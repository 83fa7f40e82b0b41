"""What users' modules and optimizers do late or past torch's parameters counts, or is told, on every rank."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.faults.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import job_as, settings, train, trained
from tests.strategies.test_ddp import QUICK
from trainer.errors import UserError
from trainer.loop import fit
from trainer.strategies.data_parallel import to_gather
from trainer.strategies.whole_scalars import whole_scalars

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
    logging.getLogger("trainer.strategies").addHandler(handler)
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


class ByNumbers(torch.optim.SGD):
    """Reads numbers from gradients and parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            norm = sum(float(parameter.grad.norm()) ** 2 for parameter in held) ** 0.5
            for parameter in held:
                scale = parameter.grad.abs().max().item() if parameter.mean() > 0 else 1.0
                parameter.sub_(group["lr"] * scale * parameter.grad / norm)


def _reads() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(torch.full((2,), float(torch.distributed.get_rank())), mesh, [Shard(0)])
    ours = ByNumbers([nn.Parameter(torch.ones(1))], lr=0.1)
    with whole_scalars(ours):
        total = rows.sum()
        numbers = [total.item(), rows.tolist(), float(total), int(total), complex(total), 1.0 in rows]
        return [*numbers, bool(total), torch.is_nonzero(total), total.is_nonzero()]


def test_every_way_to_read_a_number_reads_that_of_the_whole() -> None:
    for read in run_ranks(_reads, 2):
        assert read == [2.0, [0.0, 0.0, 1.0, 1.0], 2.0, 2, 2 + 0j, True, True, True, True]


def _drop_item(weight: Tensor) -> None:
    weight[-1] = 0


def _replace(weight: Tensor) -> None:
    weight.data = weight * 2


LOST = {
    "item": lambda weight: weight[0].mul_(2),
    "set item": _drop_item,
    "rows": lambda weight: weight[:1].zero_(),
    "one of all": lambda weight: weight.view(-1)[0].zero_(),
    "chunk": lambda weight: weight.chunk(2)[1].zero_(),
    "diagonal": lambda weight: weight.diagonal().zero_(),
    "of the transposed": lambda weight: weight.T[:, 0].zero_(),
    "detached": lambda weight: weight.detach()[0].zero_(),
    "out": lambda weight: torch.mul(weight[0], 2, out=weight[0]),
    "data": _replace,
    "as a vector": lambda weight: nn.utils.vector_to_parameters(torch.ones(16), [weight]),
    "by index": lambda weight: weight[:, 0].index_add_(0, torch.tensor([1]), torch.ones(1)),
}
KEPT = {
    "whole": lambda weight: weight.mul_(2),
    "columns": lambda weight: weight[:, :2].mul_(2),
    "column": lambda weight: weight[..., 1].zero_(),
    "all": lambda weight: weight[:].zero_(),
    "flat": lambda weight: weight.view(-1).add_(1),
    "transposed": lambda weight: weight.T.mul_(2),
    "mask": lambda weight: weight.__setitem__(weight > 7, 0),
    "read": lambda weight: weight.mul_(weight[0].clone()),
    "of a copy": lambda weight: weight[0].clone().mul_(2),
}


def _written() -> dict[str, str]:
    """What becomes of each way to write: refused, kept, or lost."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, write in (LOST | KEPT).items():
        plain = torch.arange(16.0).reshape(4, 4)
        sharded = nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]))
        write(plain)
        try:
            with torch.no_grad(), whole_scalars(ByNumbers([nn.Parameter(torch.ones(1))], lr=0.1)):
                write(sharded)
            found[name] = "kept" if sharded.full_tensor().equal(plain) else "lost"
        except UserError as error:
            found[name] = str(error)
        except RuntimeError:
            found[name] = "refused by torch"  # 2.11 and 2.14 take no mask of a sharded tensor
    return found


def test_no_write_into_a_part_of_a_sharded_tensor_is_lost() -> None:
    for found in run_ranks(_written, 2):
        mask = "refused by torch" if found["mask"] != "kept" else "kept"
        assert {name: found[name] for name in KEPT} == {**dict.fromkeys(KEPT, "kept"), "mask": mask}
        for name in LOST:
            assert "into a part of a sharded tensor, such as parameter[0]" in found[name], (name, found[name])


NUMBERS = (
    *OWN,
    f"optim={{_target_: {__name__}.ByNumbers, lr: 0.1}}",
    "~optim.momentum",
    "~optim.weight_decay",
)
# The same buffers in another order on each rank.
ORDER = (*OWN, "+model.how='in an order'", "train.max_steps=2")


def _models(root: Path, strategies: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, words in strategies.items():
        found[f"numbers {name}"] = trained(*NUMBERS, *words, f"run_dir={root / name}")
        with job_as(settings(*ORDER, *words, f"run_dir={root / name}_order")) as context:
            fit(context)
            found[f"order {name}"] = {n: buffer.clone() for n, buffer in context.state.model.named_buffers()}
    return found


@pytest.mark.slow
def test_numbers_are_of_whole_tensors_and_buffers_of_their_names(tmp_path: Path) -> None:
    single = run_ranks(_models, 1, tmp_path, {"single": ("strategy=single",)}, init=False)[0]
    for found in run_ranks(_models, 2, tmp_path, STRATEGIES, init=False):
        for strategy in STRATEGIES:
            # Each of several servers sees the gradients of its own parameters alone, and a note says so.
            for name, value in single["numbers single"].items() if strategy != "servers" else ():
                assert value.sub(found[f"numbers {strategy}"][name]).abs().max() < 1e-6, (strategy, name)
            assert found[f"order {strategy}"]["up"].allclose(torch.tensor(0.1)), strategy
            assert found[f"order {strategy}"]["down"].allclose(torch.tensor(0.2)), strategy


def test_dp_cannot_gather_a_loss_without_dimensions() -> None:
    assert to_gather({"logits": torch.zeros(2, 3), "loss": None})
    with pytest.raises(UserError, match="returns a tensor without dimensions"):
        to_gather({"logits": torch.zeros(2, 3), "loss": torch.zeros(())})
