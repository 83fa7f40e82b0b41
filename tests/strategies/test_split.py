"""A model split over several devices is the same model; inputs move to units on other devices."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.runs import context_of, trained
from trainer.errors import UserError
from trainer.loop import fit
from trainer.strategies.split import Split, _Together

COMMON = (
    "logger=jsonl",
    "train.max_steps=6",
    "train.global_batch_size=16",
    "train.eval_every_epochs=0",
    "train.log_every_steps=3",
    "checkpoint.every_epochs=null",
)
GPT_RUN = ("data=text", "model=gpt", "data.dataset.block_size=16", "model.width=16", "model.depth=3")
MODELS = {"mlp": ("model.hidden=[64,64]",), "gpt": (*GPT_RUN, "model.num_heads=2", "optim.lr=0.1")}


def both(root: str, *strategy: str) -> dict[str, list[dict[str, Tensor]]]:
    """Each model, whole and split."""
    ways = {"whole": (), "split": ("strategy.devices_per_replica=2", "strategy.devices=[cpu,cpu]")}
    return {
        name: [
            trained(*COMMON, *overrides, *strategy, *way, f"run_dir={root}/{name}-{key}")
            for key, way in ways.items()
        ]
        for name, overrides in MODELS.items()
    }


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)]
)
def test_a_split_model_has_the_same_bits(tmp_path: Path, strategy: str, world_size: int) -> None:
    ranks = run_ranks(both, world_size, str(tmp_path), f"strategy={strategy}", init=False)
    for rank in ranks:
        for name, (whole, split) in rank.items():
            assert all(torch.equal(whole[key], split[key]) for key in whole), name


def count_moves(root: str) -> dict[str, float]:
    split = ("strategy=single", "strategy.devices_per_replica=3", "strategy.devices=[cpu,cpu,cpu]")
    with context_of(*COMMON, "model.hidden=[64,64]", *split, f"run_dir={root}") as context:
        fit(context)
        return context.strategy.metrics()


def test_moves_are_counted(tmp_path: Path) -> None:
    (metrics,) = run_ranks(count_moves, 1, str(tmp_path), init=False)
    assert metrics == {"split/moves_per_pass": 3.0}  # two to the next, one back to the targets


def test_units_are_given_out_in_order_and_tied_weights_lie_together() -> None:
    cpu = torch.device("cpu")
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    split = Split(layers, [cpu, cpu])
    first = [*layers[0].parameters(), *layers[1].parameters(), *layers[1].buffers()]
    second = [*layers[3].parameters(), *layers[4].parameters()]
    assert split.num_bytes == [sum(t.nbytes for t in first), sum(t.nbytes for t in second)]
    assert layers(torch.ones(2, 8)).shape == (2, 4)
    assert split.moves == 2  # to the second, and back

    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    tied[3].weight = tied[0].weight
    split = Split(tied, [cpu, cpu])
    assert split.num_bytes[0] == sum(
        t.nbytes for t in (*tied[0].parameters(), *tied[1].parameters(), tied[3].bias)
    )
    tied(torch.ones(2, 8))
    assert split.moves == 2  # to the third, and back to the one that is tied: the output is where it was


class Appends(nn.Linear):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(super().forward(x))
        return kept[-1]


class Keeps(nn.Module):
    """Its units add to a list of the model's; its result is not a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Appends(4, 4), Appends(4, 4)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = defaultdict(list)
        self.second(self.first(x, found["kept"]), found["kept"])
        return found


def test_units_are_given_the_lists_of_their_caller_and_no_copies() -> None:
    model, rows = Keeps(), torch.ones(2, 4)
    whole = model(rows)["kept"]
    Split(model, [torch.device("cpu")] * 2)
    split = model(rows)["kept"]
    assert len(split) == 2 and all(map(torch.equal, whole, split))


def test_tensors_of_several_devices_meet_where_they_are_written() -> None:
    here, there = torch.zeros(2, 2), torch.zeros(2, 2, device="meta")
    split = Split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [torch.device("cpu")] * 2)
    with pytest.raises(RuntimeError, match="meta"):
        torch.cat([here, there])
    with _Together(split):
        assert torch.cat([here, there]).is_meta and torch.add(here, other=there).is_meta
        assert there.add_(here) is there
        there[0] = here[0]
        assert torch.nn.functional.linear(here, nn.Parameter(there)).is_meta
    assert split.moves == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy.devices_per_replica=2",), r"strategy.devices=\[cpu,cpu\]"),
        (("strategy.devices=[cpu,cpu]",), "set it to 2"),
        (
            ("strategy.devices_per_replica=9", "strategy.devices=[" + ",".join(["cpu"] * 9) + "]"),
            "has 3 units",
        ),
    ],
)
def test_what_cannot_be_split_is_one_message(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(*COMMON, "strategy=single", *overrides, f"run_dir={tmp_path}")
