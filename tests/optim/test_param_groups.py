"""Parameter groups and frozen parameters: members, training, saving and resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.gpt import GPT
from tests import runs
from tests.ranks import run_ranks
from trainer.config import load
from trainer.errors import UserError
from trainer.loop import fit
from trainer.model.frozen_statistics import follow_frozen_statistics, keep_frozen_statistics
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer, freeze, parameter_sets
from trainer.optim.schedules import ScheduleFacts, build_schedule
from trainer.run_dir.metrics_file import read_metrics

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
NO_DECAY = {"below_dims": 2, "match": "position"}


def _names(model: nn.Module, sets: list[dict[str, Any]]) -> dict[str, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {each.get("name", "base"): {names[p] for p in each["params"]} for each in sets}


def test_which_gpt_parameters_have_weight_decay() -> None:
    model = GPT(vocab_size=8, block_size=4, width=4, depth=1, num_heads=1)
    found = _names(
        model, parameter_sets(TrainableParameters(model), {**ADAMW, "no_decay": NO_DECAY})["optim"]
    )
    every = dict(model.named_parameters())
    assert found.keys() == {"base", "no_decay"}
    assert found["no_decay"] == {n for n, p in every.items() if p.ndim < 2} | {"position_embedding.weight"}
    assert found["base"] | found["no_decay"] == every.keys()


def test_a_groups_name_is_the_word_in_its_pattern_or_the_pattern() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"match": r"^0\.", "lr_scale": 1}, {"match": "^(?!2)", "lr_scale": 1}]
    sets = parameter_sets(TrainableParameters(model), {**ADAMW, "groups": groups})["optim"]
    assert set(_names(model, sets)) == {"0", "^(?!2)", "base"}


def test_the_first_match_wins_and_other_parameters_are_unchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    groups = [
        {"match": r"^2\.", "lr_scale": 0.5, "name": "head"},
        {"match": "bias", "weight_decay": 0.25},
        {"match": "^0", "lr_scale": 0},
    ]
    sets = parameter_sets(TrainableParameters(model), {**ADAMW, "no_decay": NO_DECAY, "groups": groups})[
        "optim"
    ]
    assert _names(model, sets) == {
        "no_decay": {"1.weight"},
        "head": {"2.weight"},
        "head/no_decay": {"2.bias"},
        "bias": {"0.bias", "1.bias"},
        "0": {"0.weight"},
    }
    values = {each["name"]: {key: each.get(key) for key in ("lr", "weight_decay")} for each in sets}
    assert values == {
        "no_decay": {"lr": None, "weight_decay": 0},
        "head": {"lr": 0.05, "weight_decay": None},
        "head/no_decay": {"lr": 0.05, "weight_decay": 0},
        "bias": {"lr": None, "weight_decay": 0.25},
        "0": {"lr": 0, "weight_decay": None},
    }
    optimizer = build_optimizer(TrainableParameters(model), {**ADAMW, "no_decay": NO_DECAY, "groups": groups})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5, 0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.groups=[{match:'('}]", "optim.groups.0.match is (, but must be a regular expression"),
        (
            "optim.groups=[{match:x,decay:0}]",
            "optim.groups.0.decay is not a setting; expected one of match, name",
        ),
        ("model.freeze=['[']", "model.freeze is [, but must be a regular expression of parameter names"),
    ],
)
def test_refuses(override: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        load(runs.composed(override))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [{"match": "haed"}],
            r"optim\.groups\.0\.match=haed matches none of the 4 parameters, such as 1\.bias",
        ),
        (
            [{"match": "0"}, {"match": "1", "name": "0"}],
            "two entries of optim.groups are named 0; give them different names",
        ),
    ],
)
def test_refuses_groups_that_do_not_fit_the_model(groups: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parameter_sets(
            TrainableParameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), {**ADAMW, "groups": groups}
        )


def test_refuses_options_that_the_optimizer_lacks() -> None:
    model, rprop = nn.Linear(2, 2), {"_target_": "torch.optim.Rprop", "lr": 0.1}
    with pytest.raises(UserError, match="sets weight_decay, but Rprop has no weight decay"):
        build_optimizer(
            TrainableParameters(model), {**rprop, "groups": [{"match": "bias", "weight_decay": 0.1}]}
        )
    del rprop["lr"]
    with pytest.raises(UserError, match=r"lr_scale multiplies optim\.lr, which is not set"):
        build_optimizer(TrainableParameters(model), {**rprop, "groups": [{"match": "bias", "lr_scale": 0.1}]})


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with pytest.raises(UserError, match="matches none of the 6 parameters"):
        freeze(model, {"freeze": "conv"})
    freeze(model, {"freeze": [r"^[01]\."]})
    keep_frozen_statistics(model)
    model.train()
    model(torch.randn(4, 2) + 5)
    assert not model[1].running_mean.any() and model[2].running_mean.any()
    assert [module.training for module in model] == [True, False, True]
    model[1].requires_grad_(True)
    follow_frozen_statistics(model)
    assert model[1].training
    with pytest.raises(UserError, match="freezes all 6 parameters"):
        freeze(model, {"freeze": "."})


def test_shapes_of_wsd_and_cosine() -> None:
    def rates(name: str, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = build_schedule(
            {"_target_": f"trainer.optim.schedules.{name}", "total_steps": "auto", **options},
            optimizer,
            ScheduleFacts(100, 5),
        )
        found = []
        for _ in range(100):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step(), schedule.step()
        return found

    found = rates("wsd", warmup_steps=9, decay_fraction=0.5, final_fraction=0.1)
    assert found[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert set(found[10:54]) == {1.0} and found[77] == pytest.approx(0.55, abs=0.02)
    assert found[99] == pytest.approx(0.12, abs=0.02)
    torchs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torchs, T_max=100)
    for mine in rates("cosine"):
        assert mine == pytest.approx(torchs.param_groups[0]["lr"], abs=1e-9)
        torchs.step(), schedule.step()


COMMON = (
    "logger=jsonl",
    "optim=adamw",
    "optim.lr=0.05",
    "model._target_=tests.user_parts.Normed",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "data.dataset={_target_:tests.user_parts.Stripes}",
    "train.global_batch_size=16",  # 8 steps an epoch
    "train.max_steps=8",
    "train.log_every_steps=2",
    "schedule=wsd",
    "model.freeze=['^layers.1']",
    "optim.groups=[{match:'^layers.3',lr_scale:0.5,name:head},{match:'^layers.0.bias',lr_scale:0}]",
    "checkpoint.every_steps=5",
)
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}


def _rates(run_dir: Path, strategy: str, *overrides: str) -> tuple[list[float], dict[int, float]]:
    """Return the rates that each update used, and the logged rates."""
    options = (f"strategy={strategy}", *overrides, "train.max_steps=6", "train.log_every_steps=2")
    options += ("schedule=cosine", "train.eval_every_epochs=0", "checkpoint.every_epochs=null")
    used: list[float] = []
    with runs.context_of(*options, f"run_dir={run_dir}") as context:
        optimizer = context.state.optimizer
        optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
        fit(context)
    return used, read_metrics(run_dir)["train/lr"]


@pytest.mark.parametrize(
    "settings",
    [
        ("single",),
        pytest.param(("parameter_server", "strategy.servers=1"), marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings[0],
)
def test_a_step_is_logged_with_the_learning_rate_it_used(settings: tuple[str, ...], tmp_path: Path) -> None:
    world_size = 1 if settings[0] == "single" else 2
    used, logged = run_ranks(_rates, world_size, tmp_path, *settings, init=False)[0]
    assert len(set(used)) == 6
    assert logged == {step: used[step - 1] for step in (2, 4, 6)}


def _whole(context: Any) -> dict[str, Tensor]:
    state = context.state.model.state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def _train_and_resume(root: Path, strategy: str, foreign: str | None) -> dict[str, Any]:
    options = (*COMMON, f"strategy={strategy}")
    with runs.context_of(*options, f"run_dir={root / 'whole'}") as context:
        begin = _whole(context)
        fit(context)
        end = _whole(context)
        trained = sum(len(group["params"]) for group in context.state.optimizer.param_groups)
    stop = root / "whole" / "checkpoints" / "step_00000005"
    once = (*options, "checkpoint.every_steps=null", f"resume={stop}")
    with runs.context_of(*once, f"run_dir={root / 'resumed'}") as context:
        fit(context)
        resumed = _whole(context)
    if foreign is not None:
        with runs.context_of(*once[:-1], f"resume={foreign}", f"run_dir={root / 'foreign'}") as context:
            assert context.state.progress.step == 5
            next(runs.steps_of(context))
    # The last, since its process group is not let go of.
    other = runs.context_of(*once, "model.freeze=null", f"run_dir={root / 'other'}")
    with pytest.raises(UserError) as refused, other:
        pass
    return {"begin": begin, "end": end, "resumed": resumed, "trained": trained, "refused": str(refused.value)}


@pytest.mark.slow
def test_groups_and_frozen_parameters_under_each_strategy(tmp_path: Path) -> None:
    """Each run also resumes from the checkpoint of the previous one."""
    ends = {}
    foreign = None
    for strategy, world in STRATEGIES.items():
        root = tmp_path / strategy
        results = run_ranks(_train_and_resume, world, root, strategy, foreign, init=False)
        foreign = str(root / "whole" / "checkpoints" / "step_00000005")
        for result in results:
            begin, end = result["begin"], result["end"]
            unchanged = {name for name in begin if begin[name].equal(end[name])}
            assert unchanged == {name for name in begin if name.startswith("layers.1.")} | {"layers.0.bias"}
            assert result["trained"] == 4
            assert all(end[name].equal(result["resumed"][name]) for name in end)
            assert "this run's optimizer has 6 in 5: layers.1.bias, layers.1.weight" in result["refused"]
            assert "as in the checkpoint" in result["refused"]
        ends[strategy] = results[0]["end"]
    for strategy in ("ddp", "fsdp"):
        for name, value in ends[strategy].items():
            torch.testing.assert_close(value, ends["single"][name], rtol=1e-4, atol=1e-5)
