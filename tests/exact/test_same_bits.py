"""With train.exact a run has the same bits at any world size, strategy and all-reduce."""

from pathlib import Path

import pytest

from tests.exact.matrix import MODELS, OPTIMIZERS, figures, matrix

NORM = (*MODELS["norm"], *OPTIMIZERS["adamw"], "train.max_steps=6")


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    short = (*NORM, "train.max_steps=2")
    alone = figures(tmp_path / "1", 1, (*short, "strategy=single"))
    two = figures(tmp_path / "2", 2, (*short, "strategy=ddp", "comm=ring"))
    without = figures(tmp_path / "0", 2, (*short, "strategy=ddp", "comm=ring", "train.exact=null"))
    assert two == alone != without


@pytest.mark.slow
def test_ranks_strategies_and_all_reduces_give_one_hash(tmp_path: Path) -> None:
    """Also a number of ranks that does not divide the leaves, and evaluation."""
    alone = figures(tmp_path / "1", 1, (*NORM, "strategy=single"), (*NORM, "strategy=fsdp"))
    three = figures(tmp_path / "3", 3, (*NORM, "strategy=ddp", "comm=ring"))
    two = figures(tmp_path / "2", 2, (*NORM, "strategy=fsdp"), (*NORM, "strategy=ddp"))
    assert {*alone, *three, *two} == {alone[0]}
    without = [(*NORM, "strategy=single", "train.exact=null"), (*NORM, "strategy=ddp", "train.exact=null")]
    assert (
        len({figures(tmp_path / f"not{number}", 1 + number, case)[0] for number, case in enumerate(without)})
        == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("model, optimizer", [("mlp", "sgd"), ("resnet", "adamw"), ("gpt", "adamw")])
def test_each_model_has_one_hash(tmp_path: Path, model: str, optimizer: str) -> None:
    """Of the matrix one all-reduce in each world; `python -m benchmarks.exact --matrix` runs the whole."""
    found = matrix(
        tmp_path, model, optimizer, {2: ("native",), 3: ("tree",), 4: ("hierarchical",), 8: ("ring",)}, 8
    )
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_without_it_there_are_many_hashes(tmp_path: Path) -> None:
    words = (*MODELS["mlp"], *OPTIMIZERS["adamw"], "train.exact=null")
    found = figures(tmp_path / "1", 1, (*words, "strategy=single"))
    cases = [
        (*words, f"strategy={name}", f"comm={comm}")
        for name in ("ddp", "fsdp")
        for comm in ("native", "ring", "tree")
    ]
    for world in (2, 4):
        found += figures(tmp_path / str(world), world, *cases)
    assert len({each[0] for each in found}) >= 5
