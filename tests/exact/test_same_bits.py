"""With train.exact a run has the same bits at any world size, strategy and all-reduce."""

from pathlib import Path

import pytest

from tests.exact.matrix import MODELS, OPTIMIZERS, figures, matrix

NORM = (*MODELS["norm"], *OPTIMIZERS["adamw"], "train.max_steps=6")


def test_two_ranks_are_bit_identical_to_one(tmp_path: Path) -> None:
    short = (*NORM, "train.max_steps=2")
    alone = figures(tmp_path / "1", 1, (*short, "strategy=single"))
    ring = (*short, "strategy=ddp", "comm=ring")
    two, without = figures(tmp_path / "2", 2, ring, (*ring, "train.exact=null"))
    assert alone == [two] != [without]


@pytest.mark.slow
def test_ranks_strategies_and_all_reduces_give_one_hash(tmp_path: Path) -> None:
    """Also for a number of ranks that does not divide the number of chunks, and for evaluations."""
    alone = figures(tmp_path / "1", 1, (*NORM, "strategy=single"), (*NORM, "strategy=fsdp"))
    three = figures(tmp_path / "3", 3, (*NORM, "strategy=ddp", "comm=ring"))
    two = figures(tmp_path / "2", 2, (*NORM, "strategy=fsdp"), (*NORM, "strategy=ddp"))
    assert {*alone, *three, *two} == {alone[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer", "comms"),
    [
        ("mlp", "sgd", {3: ("tree",)}),
        ("resnet", "adamw", {2: ("native",)}),
        ("gpt", "adamw", {4: ("hierarchical",)}),
    ],
)
def test_each_model_has_one_hash(
    tmp_path: Path, model: str, optimizer: str, comms: dict[int, tuple[str, ...]]
) -> None:
    """Each model, world size and all-reduce once; `python -m benchmarks.exact --matrix` runs all combinations."""
    found = matrix(tmp_path, model, optimizer, comms, steps=4)
    assert len(set(found.values())) == 1, found
