"""A group with its own optimizer: Muon for matrices and AdamW for the rest, sharded or not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon

from models.gpt import GPT
from tests import runs
from tests.ranks import run_ranks
from trainer.distributed.agreement import gather_objects
from trainer.errors import UserError
from trainer.loop import fit
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.combined import CombinedOptimizer, parts_of
from trainer.optim.param_groups import build_optimizer, described
from trainer.optim.schedules import ScheduleFacts, build_schedule

MUON = {"_target_": "torch.optim.Muon", "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
OPTIM = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5, "no_decay": {"below_dims": 2}}
OPTIM |= {"groups": [{"match": "^0", "dims": 2, "optimizer": MUON}]}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def stepped(model: nn.Module, *optimizers: Any, steps: int = 3) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_each_groups_optimizer_makes_the_same_updates_as_torchs() -> None:
    model, plain = network(), network()
    optimizer = build_optimizer(TrainableParameters(model), OPTIM)
    assert isinstance(optimizer, CombinedOptimizer)
    assert [type(part) for part in optimizer.parts] == [AdamW, Muon]
    assert [(g.get("name"), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        *((None, 0.1, 0.5), ("no_decay", 0.1, 0.0), ("0", 0.1, 0.2))
    ]
    bias, weight = [plain[0].bias, plain[2].bias], [plain[2].weight]
    sets = [{"params": weight}, {"params": bias, "weight_decay": 0.0}]
    adamw = AdamW(sets, lr=0.1, weight_decay=0.5, fused=True)
    muon = Muon([plain[0].weight], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for one, other in zip(stepped(model, optimizer), stepped(plain, adamw, muon), strict=True):
        assert torch.equal(one, other)
    words = described(optimizer, TrainableParameters(model))
    assert words["  0"] == "Muon, 1 tensors, 35 parameters, weight_decay 0.2"


def test_state_is_restored_and_a_schedule_scales_all_groups() -> None:
    def fresh() -> tuple[nn.Module, Any, Any]:
        model = network()
        optimizer = build_optimizer(TrainableParameters(model), OPTIM)
        node = {"_target_": "trainer.optim.schedules.linear", "total_steps": "auto"}
        return model, optimizer, build_schedule(node, optimizer, ScheduleFacts(10, 5))

    model, optimizer, schedule = fresh()
    stepped(model, optimizer)
    schedule.step()
    other, again, other_schedule = fresh()
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_schedule.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.09] * 3)
    groups = iter(again.param_groups)
    for part in again.parts:
        assert all(group is next(groups) for group in part.param_groups) and part.state is again.state
    for one, two in zip(stepped(model, optimizer), stepped(other, again), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            {"match": "bias", "optimizer": MUON},
            "groups.0.optimizer: torch.optim.Muon cannot be built: Muon only",
        ),
        (
            {"optimizer": MUON},
            r"optim\.groups\.0\.match has no value; set it to .*, or set optim\.groups\.0\.dims",
        ),
        (
            {"dims": 2, "lr_scale": 2, "optimizer": MUON | {"lr": 0.1}},
            r"optimizer\.lr is 0\.1, but optim\.groups\.0 sets lr_scale, a factor of optim\.lr, to 2\.0; remove",
        ),
    ],
)
def test_refuses(group: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_optimizer(TrainableParameters(network()), OPTIM | {"groups": [group]})


def test_a_group_has_its_optimizers_rate_or_optim_lr() -> None:
    def rate(optimizer: dict[str, Any], **group: Any) -> float:
        groups = [{"dims": 2, "optimizer": MUON | optimizer, **group}]
        return build_optimizer(TrainableParameters(network()), OPTIM | {"groups": groups}).param_groups[-1][
            "lr"
        ]

    assert (rate({}), rate({"lr": 0.3}), rate({}, lr_scale=0.5)) == (0.1, 0.3, 0.05)
    matrix = TrainableParameters(nn.Linear(2, 2, bias=False))
    alone = build_optimizer(matrix, OPTIM | {"groups": [{"dims": 2, "optimizer": MUON}]})
    assert type(alone) is Muon, "no other optimizer has parameters"


# ---- runs

SMALL = (
    *("logger=jsonl", "experiment=text_gpt_muon", "data.dataset.block_size=16", "model.width=24"),
    *("model.depth=2", "model.num_heads=2", "train.global_batch_size=8", "train.max_steps=6"),
    *("train.eval_every_epochs=0", "schedule=constant", "~schedule.final_fraction", "optim.lr=0.01"),
    *("checkpoint.every_steps=3", "checkpoint.keep_last=9", "distributed.timeout_s=60"),
)
# Units of a block: blocks' matrices of 24 and 72 or 96 rows do not divide by 5 ranks, nor their number.
FSDP = ("strategy=fsdp", "strategy.unit_min_params=1000")
SERVERS = ("strategy=parameter_server", "strategy.servers=all")


# Muon computes in bf16: where gradients differ in their last bit, as after sums in another order, its updates may
# by a thousandth. Doubles leave next to nothing to round otherwise.
DOUBLES = ("model._target_=tests.optim.test_combined.gpt_of_doubles",)


def gpt_of_doubles(**settings: Any) -> GPT:
    return GPT(**settings).double()


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def end_of(run_dir: Path, *overrides: str) -> dict[str, Tensor]:
    """Return weights, and the state of both optimizers, after the last step."""
    with runs.context_of(*SMALL, *overrides, f"run_dir={run_dir}") as context:
        fit(context)
        assert parts_of(context.state.optimizer)[0].__class__ is AdamW
        found = {name: whole(value) for name, value in context.state.model.state_dict().items()}
        own: dict[str, Tensor] = {}
        with context.strategy.gathered(context.state):
            state = context.state.state_dict()["optimizer"]["state"]
            for name in sorted(state):
                own |= {f"{name} {key}": whole(value) for key, value in state[name].items()}
        for of_rank in gather_objects(own):  # under fsdp each rank has Muon's state of its own matrices
            found |= of_rank
        return found


def trained(root: Path, cases: dict[str, tuple[str, ...]], foreign: str) -> dict[str, dict[str, Any]]:
    """Run each case to its end, resume it from the middle, and from another strategy's checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for name, overrides in cases.items():
        saved = root / name / "checkpoints" / "step_00000003"
        once = (*overrides, "checkpoint.every_steps=null", "checkpoint.every_epochs=null")
        found[name] = {"end": end_of(root / name, *overrides)}
        found[name]["resumed"] = end_of(root / f"{name}-on", *once, f"resume={saved}")
        if foreign:
            found[name]["converted"] = end_of(root / f"{name}-from", *once, f"resume={foreign}")
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("single")
    cases = {"single": ("strategy=single", *DOUBLES), "exact": ("strategy=single", "train.exact=4")}
    return root, run_ranks(trained, 1, root, cases, "", init=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, {"ddp": ("strategy=ddp", *DOUBLES), "fsdp": (*FSDP, *DOUBLES), "servers": (*SERVERS, *DOUBLES)}),
        (4, {"hybrid": (*FSDP, *DOUBLES, "strategy.shard_group=2")}),
    ],
)
def test_muon_with_adamw_equals_one_process_and_resumes_exactly(
    world_size: int, cases: dict[str, tuple[str, ...]], single: Any, tmp_path: Path
) -> None:
    root, alone = single
    foreign, whole_end = str(root / "single" / "checkpoints" / "step_00000003"), alone["single"]["end"]
    ranks = run_ranks(trained, world_size, tmp_path, cases, foreign, init=False)
    for name in cases:
        kept = set[str]().union(*(found[name]["end"] for found in ranks))
        assert kept == whole_end.keys(), "of a server's state each rank has its own"
        assert any("momentum_buffer" in key for key in kept) and any("exp_avg" in key for key in kept)
        for found in ranks:
            end = found[name]["end"]
            assert apart(end, found[name]["resumed"]) == 0, name
            for other in (end, found[name]["converted"]):
                assert apart(other, {key: whole_end[key] for key in end}) < 1e-6, name


@pytest.mark.slow
def test_with_exact_the_result_is_bit_identical_to_one_process(single: Any, tmp_path: Path) -> None:
    cases = {name: (f"strategy={name}", "train.exact=4") for name in ("ddp", "fsdp")}
    for found in run_ranks(trained, 2, tmp_path, cases, "", init=False):
        for name in cases:
            assert apart(found[name]["end"], single[1]["exact"]["end"]) == 0, name
