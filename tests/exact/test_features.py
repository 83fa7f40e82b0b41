"""What goes with train.exact: one hash under single, ddp and fsdp."""

from pathlib import Path

import pytest

from tests.exact.matrix import MODELS, OPTIMIZERS, figures

MLP = (*MODELS["mlp"], *OPTIMIZERS["adamw"], "train.max_steps=6")
FEATURES = {
    "groups": ('optim.groups=[{match: "^second", weight_decay: 0, lr_scale: 10}]',),
    "freeze": ('model.freeze=["^first"]', 'optim.groups=[{match: "^head", lr_scale: 10}]'),
    "activation_checkpointing": ("strategy.activation_checkpointing=true",),
    "average": ("ema.decay=0.9",),
    "bf16": ("train.precision=bf16",),
    "split": ("strategy.devices_per_replica=2", "strategy.devices=[cpu,cpu]"),
}
# In bf16 fsdp computes with parameters in bf16, and autocast casts them op by op: both are told at the start.
HASHES = {"bf16": [("single", 1), ("ddp", 2)], "split": [("single", 1), ("ddp", 2)]}
ALL = [("single", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_one_hash_with(tmp_path: Path, feature: str) -> None:
    words = (*MLP, *FEATURES[feature])
    found = {}
    for world in (1, 2):
        names = [name for name, of in HASHES.get(feature, ALL) if of == world]
        each = figures(tmp_path / str(world), world, *((*words, f"strategy={name}") for name in names))
        found |= {f"{name} {world}": figure for name, figure in zip(names, each, strict=True)}
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_in_bf16_the_shards_of_any_number_of_ranks_have_one_hash(tmp_path: Path) -> None:
    words = (*MLP, *FEATURES["bf16"], "strategy=fsdp")
    found = [figures(tmp_path / str(world), world, words)[0] for world in (1, 2, 4)]
    assert len(set(found)) == 1, found
