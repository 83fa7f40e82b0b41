"""With train.exact a run has the same bits at any world size, strategy and all-reduce."""

from pathlib import Path

import pytest

from tests.exact.matrix import MODELS, OPTIMIZERS, figures

NORM = (*MODELS["norm"], *OPTIMIZERS["adamw"], "train.max_steps=6")
COMMS = ("native", "ring", "tree", "halving_doubling", "hierarchical", "master_worker")


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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "resnet", "gpt"])
def test_the_whole_matrix_gives_one_hash(tmp_path: Path, model: str, optimizer: str) -> None:
    words = (*MODELS[model], *OPTIMIZERS[optimizer])
    found = {"single": figures(tmp_path / "1", 1, (*words, "strategy=single"))[0]}
    for world in (2, 3, 4, 8):
        comms = COMMS if world == 4 else ("native",)
        cases = {f"ddp {world} {comm}": (*words, "strategy=ddp", f"comm={comm}") for comm in comms}
        if world != 3:
            cases |= {f"fsdp {world} {comm}": (*words, "strategy=fsdp", f"comm={comm}") for comm in comms}
        hosts = [0, 0, 1, 1] if world == 4 else None
        each = figures(tmp_path / str(world), world, *cases.values(), hosts=hosts, timeout_s=600)
        found |= dict(zip(cases, each, strict=True))
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
