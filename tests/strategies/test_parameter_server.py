"""The parameter server gives the same model as DDP, and resumes from checkpoints of any strategy."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.failure_parts import inject
from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, train, trained
from trainer.errors import UserError
from trainer.loop import fit
from trainer.run_dir.metrics_file import read_metrics

STEPS = 10
COMMON = (
    "logger=jsonl",
    "data=digits",
    "model=mlp",
    "schedule=cosine",
    f"train.max_steps={STEPS}",
    "train.global_batch_size=48",
    "train.log_every_steps=4",
    "train.check_replicas_every=5",
    "checkpoint.every_epochs=null",
    "train.eval_every_epochs=0",
    "distributed.timeout_s=30",
)
SGD = ("optim=sgd", "optim.lr=0.1", "optim.momentum=0.9")
ADAMW = ("optim=adamw", "optim.lr=0.01")
PS = ("strategy=parameter_server", "strategy.bucket_mb=0.01")
MLP = ("input_shape", "hidden", "num_classes")  # settings that other models do not have
CASES = {
    "sgd": ("model.hidden=[64,64]", *SGD),
    "adamw": ("model.hidden=[64,64]", *ADAMW),
    "accumulated": ("model.hidden=[64,64]", *SGD, "train.micro_batch_size=4"),
    "clipped": ("model.hidden=[64,64]", *ADAMW, "train.clip_grad_norm=0.1"),
    "bf16": ("model.hidden=[64,64]", *SGD, "train.precision=bf16"),
    "fp16": ("model.hidden=[64,64]", *ADAMW, "train.precision=fp16", "train.clip_grad_norm=1"),
    "frozen": ("model._target_=tests.user_parts.HalfFrozen", *(f"~model.{name}" for name in MLP), *SGD),
}
CHOSEN = {"1 x 2": "adamw accumulated frozen", "2 x 2": "sgd clipped bf16 fp16", "all x 2": "sgd clipped"}
ROLES = {"1 x 2": (3, "1"), "2 x 2": (4, "2"), "all x 2": (2, "all")}


def train_each(root: str, strategy: tuple[str, ...], names: list[str]) -> dict[str, dict[str, Tensor]]:
    runs = {name: (*COMMON, *CASES[name], *strategy, f"run_dir={root}/{name}") for name in names}
    return {name: trained(*overrides) for name, overrides in runs.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest |a - b| / (atol + rtol |b|), which must not exceed 1."""
    assert one.keys() == other.keys()
    return max(((one[k] - other[k]).abs() / (1e-6 + 1e-4 * other[k].abs())).max().item() for k in one)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the final model under DDP on two ranks, with sums in the order of one server."""

    @functools.cache
    def run(names: str) -> dict[str, Any]:
        strategy = ("strategy=ddp", "comm=master_worker")
        root = str(tmp_path_factory.mktemp("ddp"))
        return run_ranks(train_each, 2, root, strategy, names.split(), init=False)[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("roles", "names"), CHOSEN.items())
def test_any_number_of_servers_gives_the_same_model_as_ddp(
    tmp_path: Path, ddp: Callable[[str], dict[str, Any]], roles: str, names: str
) -> None:
    """Bits are equal too if sums have the same order; the norm of all servers' norms rounds differently."""
    world_size, servers = ROLES[roles]
    strategy = (*PS, f"strategy.servers={servers}")
    ranks = run_ranks(train_each, world_size, str(tmp_path), strategy, names.split(), init=False)
    for name, wanted in ddp(names).items():
        for rank, found in enumerate(ranks):
            print(roles, name, distance(found[name], wanted))
            assert distance(found[name], wanted) < 1, (name, rank)
            if not any("clip" in word for word in CASES[name]):
                assert all(torch.equal(wanted[key], found[name][key]) for key in wanted), (name, rank)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy.servers=2",), "start 3 or more"),
        (("strategy.servers=all",), "start 2 or more"),
        (("strategy.servers=0",), "strategy.servers is 0"),
        (("comm=ring",), "comm=ring needs strategy=ddp"),
    ],
)
def test_unsupported_combinations_are_one_message(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        trained(*COMMON, *PS, *overrides, f"run_dir={tmp_path}")


@pytest.mark.slow
def test_evaluates_weights_and_their_ema(tmp_path: Path) -> None:
    ran = (*COMMON, *CASES["sgd"], "train.max_steps=20", "ema.decay=0.9", "train.eval_every_epochs=1")
    ddp = run_ranks(train, 2, *ran, "strategy=ddp", f"run_dir={tmp_path}/ddp", init=False)[0]
    ps = run_ranks(train, 3, *ran, *PS, f"run_dir={tmp_path}/ps", init=False)[0]
    logged = read_metrics(tmp_path / "ps")
    weights = 4 * 8_970  # the bytes of the model
    traffic = 2 * (weights + 4 * 6) + 2 * weights
    assert list(logged["usage/ps/megabytes/server_0"].values()) == pytest.approx([traffic / 1e6] * 5)
    assert all(logged[f"usage/ps/waited_ms/worker_{rank}"] for rank in (1, 2))
    for name in ("train/loss", "eval/loss", "eval/ema/loss", "eval/accuracy"):
        assert ps[name] == pytest.approx(ddp[name], rel=1e-4), name
    assert abs(ps["eval/loss"] - ps["eval/ema/loss"]) > 1e-2


@pytest.mark.slow
def test_a_dead_worker_is_named(tmp_path: Path) -> None:
    killed = inject("kill", rank=2, step=5)
    with pytest.raises(RankFailure):
        run_ranks(train, 3, *COMMON, *CASES["sgd"], *PS, *killed, f"run_dir={tmp_path}", init=False)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["rank"], failure["step"]) == (2, 5), failure


class Counting(nn.Module):
    """Counts its passes in a buffer that it assigns anew, and in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.passes = nn.Linear(64, 10), 0
        self.register_buffer("scale", torch.zeros(1))

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.passes])

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.scale = self.scale + 1
        return self.head(images.flatten(1) * (1 + self.scale / 10))


COUNTING = ("model._target_=tests.strategies.test_parameter_server.Counting", *(f"~model.{n}" for n in MLP))


def counted(root: str, *overrides: str) -> list[set[float]]:
    """Return this rank's counts at the end of a run and of a resumed run."""
    ran, found = (*COMMON, *COUNTING, *SGD, *PS, *overrides, "checkpoint.every_steps=2"), []
    for steps in (4, 6):
        go_on = (f"run_dir={root}/run", "resume=auto", f"train.max_steps={steps}", "schedule=constant")
        with context_of(*ran, *go_on) as context:
            fit(context)
            model = cast(Any, context.strategy.unwrap(context.model))
            saved = context.state.model.state_dict()
            found.append({model.passes, *map(float, (model.scale, saved["scale"], saved["_extra_state"]))})
    return found


@pytest.mark.slow
def test_state_from_forward_passes_reaches_the_servers(tmp_path: Path) -> None:
    assert run_ranks(counted, 3, str(tmp_path), init=False) == [[{4.0}, {6.0}]] * 3
