"""What goes with train.exact: one hash under single, ddp and fsdp."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.exact.matrix import COMMON, LEAVES, MODELS, NOISY, OPTIMIZERS, figures
from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, trained
from trainer.loop import fit

MLP = (*MODELS["mlp"], *OPTIMIZERS["adamw"], "train.max_steps=4")
FEATURES = {
    "groups and average": (
        'optim.groups=[{match: "^second", weight_decay: 0, lr_scale: 10}]',
        "ema.decay=0.9",
    ),
    "freeze and activation checkpointing": (
        'model.freeze=["^first"]',
        'optim.groups=[{match: "^head", lr_scale: 10}]',
        "strategy.activation_checkpointing=true",
    ),
    "bf16": ("train.precision=bf16",),
}
# In bf16 fsdp computes with parameters in bf16, and autocast casts them op by op: both are told at the start.
HASHES = {"bf16": [("single", 1), ("ddp", 2)]}
ALL = [("single", 1), ("ddp", 2), ("fsdp", 2)]


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


class Following(nn.Module):
    """Two classes of rows (B, 6); a mean follows the data, written as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.zeros(()))
        self.teacher = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            mean = rows.mean(dim=0)
            if self.how == "in data" or (self.how == "later" and self.passes > 6):
                self.mean.data.mul_(0.9).add_(0.1 * mean)
            elif self.how == "as data":
                self.mean.data = 0.9 * self.mean.data + 0.1 * mean
            elif self.how == "late" and self.passes > 2 and not hasattr(self, "made"):
                self.register_buffer("made", mean, persistent=False)
            elif self.how == "frozen":
                with torch.no_grad():
                    self.teacher.lerp_(mean, 0.1)
        return self.layer(rows - self.mean - self.teacher)


FOLLOWING = (
    *("data.dataset._target_=tests.user_parts.Stripes", f"model._target_={__name__}.Following"),
    *("~model.input_shape", "~model.hidden", "~model.num_classes", "train.global_batch_size=16"),
    *(*OPTIMIZERS["sgd"], "train.max_steps=12"),
)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("late", "a step made the buffer made, without a mean over leaves"),
        ("later", "the buffer mean changed since the first step of this start, but not in it"),
        ("frozen", "a forward or backward pass changes teacher"),
    ],
)
def test_what_has_no_mean_over_leaves_is_refused(tmp_path: Path, how: str, words: str) -> None:
    ran = (*FOLLOWING, "strategy=single", f"train.exact={LEAVES // 4}", f"+model.how={how}")
    with pytest.raises(RankFailure, match=words):
        figures(tmp_path, 1, ran)


@pytest.mark.slow
def test_in_bf16_shards_have_one_hash(tmp_path: Path) -> None:
    words = (*MLP, *FEATURES["bf16"], "strategy=fsdp")
    found = [figures(tmp_path / str(world), world, words)[0] for world in (1, 2)]
    assert len(set(found)) == 1, found


PLATEAU = ("schedule=plateau", "schedule.patience=0", "+schedule.threshold=0.1", "train.eval_every_steps=1")
ODD = {
    "Codebook": (),
    "OwnNorm": (),
    "Extremes": (),
    "DrawsAlways": PLATEAU,  # its evaluations decide the learning rate
    "OwnOptimizer": (
        "optim._target_=tests.exact.odd_parts.Langevin",
        "~optim.momentum",
        "~optim.weight_decay",
    ),
}


@pytest.mark.slow
def test_what_is_easily_missed_has_one_hash(tmp_path: Path) -> None:
    """Buffers that are written unseen, and random numbers outside of the passes of a step."""
    cases = {}
    for name, words in ODD.items():
        model = name if name != "OwnOptimizer" else "Codebook"
        base = (
            *NOISY,
            *OPTIMIZERS["sgd"],
            f"model._target_=tests.exact.odd_parts.{model}",
            "train.max_steps=8",
        )
        cases[name] = (*base, *words)
    alone, two = (
        figures(tmp_path / strategy, world, *((*words, f"strategy={strategy}") for words in cases.values()))
        for world, strategy in ((1, "single"), (2, "ddp"))
    )
    assert dict(zip(cases, two, strict=True)) == dict(zip(cases, alone, strict=True))


@pytest.mark.slow
def test_layers_that_some_leaves_skip_have_one_hash(tmp_path: Path) -> None:
    """Also one that only an earlier leaf than the last of each rank has used."""
    words = (*NOISY, *OPTIMIZERS["adamw"], "model._target_=tests.exact.odd_parts.SkipsLayers")
    find = "strategy.find_unused_parameters=true"
    found = figures(tmp_path / "1", 1, (*words, "strategy=single"))
    found += figures(
        tmp_path / "2", 2, (*words, "strategy=ddp", find), (*words, "strategy=ddp", find, "comm=ring")
    )
    found += figures(tmp_path / "3", 3, (*words, "strategy=ddp", find))
    assert len(set(found)) == 1, found


@pytest.mark.slow
def test_integers_of_a_buffer_keep_all_bits(tmp_path: Path) -> None:
    words = (*COMMON, *NOISY, *OPTIMIZERS["sgd"], "model._target_=tests.exact.odd_parts.Extremes")
    model = run_ranks(trained, 1, *words, f"run_dir={tmp_path}", "train.max_steps=3", init=False)[0]
    assert model["count"].item() == 2**60 + 7


def _positions(*overrides: str) -> int:
    with context_of(*overrides) as context:
        fit(context)
        return context.dist.heartbeat.records().main().position


@pytest.mark.slow
def test_ranks_with_fewer_leaves_are_not_behind(tmp_path: Path) -> None:
    """A verdict names the rank that entered the fewest phases."""
    words = (*COMMON, *MLP, "strategy=ddp", f"run_dir={tmp_path}")
    assert len(set(run_ranks(_positions, 3, *words, init=False))) == 1
