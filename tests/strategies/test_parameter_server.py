"""The parameter server gives the same model as DDP, and resumes from checkpoints of any strategy."""

import copy
import functools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.dry_run import DryRun
from planner.pretend import DryRunWorld
from tests.fault_parts import fault
from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, settings, train, trained
from trainer.comm.parameter_server.layout import lay_out
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.loop import fit
from trainer.strategies.parameter_server.worker_copy import WorkerCopy

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
    "+optim.fused=false",  # torch has no fused step of SGD for shards, and a fused one rounds otherwise
)
SGD = ("optim=sgd", "optim.lr=0.1", "optim.momentum=0.9")
ADAMW = ("optim=adamw", "optim.lr=0.01")
PS = ("strategy=parameter_server", "strategy.bucket_mb=0.01")
MLP = ("input_shape", "hidden", "num_classes")  # settings that other models have not
CASES = {
    "sgd": ("model.hidden=[64,64]", *SGD),
    "adamw": ("model.hidden=[64,64]", *ADAMW),
    "accumulated": ("model.hidden=[64,64]", *SGD, "train.micro_batch_size=4"),
    "clipped": ("model.hidden=[64,64]", *ADAMW, "train.clip_grad_norm=0.1"),
    "bf16": ("model.hidden=[64,64]", *SGD, "train.precision=bf16"),
    "frozen": (
        "model._target_=tests.user_parts.HalfFrozen",
        *(f"~model.{name}" for name in MLP),
        *SGD,
    ),
}
EXACT, REST = "frozen", "sgd adamw accumulated clipped bf16"  # running statistics follow the split
# Each case also with several servers, and sums over servers with both kinds of servers.
ROLES = {"2 x 3": (5, "2", "adamw clipped"), "all x 3": (3, "all", "sgd accumulated clipped bf16")}


def train_each(root: str, strategy: tuple[str, ...], names: list[str]) -> dict[str, dict[str, Tensor]]:
    runs = {name: (*COMMON, *CASES[name], *strategy, f"run_dir={root}/{name}") for name in names}
    return {name: trained(*overrides) for name, overrides in runs.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest |a - b| / (atol + rtol |b|); above 1 is too far."""
    assert one.keys() == other.keys()
    return max(((one[k] - other[k]).abs() / (1e-6 + 1e-4 * other[k].abs())).max().item() for k in one)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The final model of rank 0 of two under DDP, with sums in the order of one server."""

    @functools.cache
    def run(names: str) -> dict[str, Any]:
        strategy = ("strategy=ddp", "comm=master_worker")
        root = str(tmp_path_factory.mktemp("ddp"))
        return run_ranks(train_each, 2, root, strategy, names.split(), init=False)[0]

    return run


@pytest.mark.parametrize("names", [EXACT, pytest.param(REST, marks=pytest.mark.slow)])
def test_one_server_gives_the_bits_of_master_worker(
    tmp_path: Path, ddp: Callable[[str], dict[str, Any]], names: str
) -> None:
    strategy = (*PS, "strategy.servers=1")
    ranks = run_ranks(train_each, 3, str(tmp_path), strategy, names.split(), init=False)
    for name, wanted in ddp(names).items():
        print(name, distance(ranks[0][name], wanted))
        if name == "clipped":  # a norm of norms of shards, in another order
            assert distance(ranks[0][name], wanted) < 1
        else:
            assert all(torch.equal(wanted[key], ranks[0][name][key]) for key in wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("roles", ROLES)
def test_any_roles_give_the_model_of_ddp(
    tmp_path: Path, ddp: Callable[[str], dict[str, Any]], roles: str
) -> None:
    world_size, servers, names = ROLES[roles]
    strategy = (*PS, f"strategy.servers={servers}")
    ranks = run_ranks(train_each, world_size, str(tmp_path), strategy, names.split(), init=False)
    for name in names.split():
        wanted = ddp(REST)[name]
        print(roles, name, distance(ranks[0][name], wanted))
        if name == "bf16":  # rounds where sums differ in their last bit
            worst = max((ranks[0][name][k] - wanted[k]).abs().max().item() for k in wanted)
            assert worst < 0.02
        else:
            assert distance(ranks[0][name], wanted) < 1, name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy.servers=2",), "start 3 or more"),
        (("strategy.servers=all",), "there is one rank"),
        (("strategy.servers=0",), "strategy.servers is 0"),
        (("comm=ring",), "comm=ring needs strategy=ddp"),
        (("train.precision=fp16",), "use train.precision=bf16"),
    ],
)
def test_what_cannot_be_is_one_message(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(*COMMON, *PS, *overrides, f"run_dir={tmp_path}")


EMBEDDING = ("model._target_=torch.nn.Embedding", "+model.num_embeddings=4", "+model.embedding_dim=2")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ((*EMBEDDING, "+model.max_norm=1.0"), r"parameter_server: the model has max_norm=1\.0"),
        (("model._target_=tests.strategies.test_fsdp.scripted",), "parameter_server needs a hook on 0"),
    ],
)
def test_a_module_that_no_copy_can_be_made_of_is_refused(model: tuple[str, ...], words: str) -> None:
    none_of_it = ("~model.hidden", "~model.input_shape", "~model.num_classes", "data=digits")
    config = settings(*model, *none_of_it, "strategy=parameter_server")
    dry_run = DryRun(config)
    with pytest.raises(UserError, match=words), dry_run.under(config, DryRunWorld(2, 2)):
        pass


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    model = nn.Linear(2, 2)
    client: Any = SimpleNamespace(ask=lambda: None, settle=lambda index: None, awaits=False, blocked_s=0.0)
    client.commit = lambda: None
    buckets = lay_out(dict(model.named_parameters()), 1, 2**20)
    replica = WorkerCopy(model, client, buckets, cast(Any, None), compiled=False, enter=lambda *bucket: None)
    with pytest.raises(UserError, match="came in several parts"), replica.pass_(first=True, last=False):
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
    replica.close()


def test_values_are_waited_for_when_they_are_used_and_not_for_a_look_at_gradients() -> None:
    model, settled = nn.Linear(2, 2), list[int]()
    client: Any = SimpleNamespace(ask=lambda: None, settle=settled.append, awaits=True, blocked_s=0.0)
    client.commit = lambda: None
    buckets = lay_out(dict(model.named_parameters()), 1, 2**20)
    replica = WorkerCopy(model, client, buckets, cast(Any, None), compiled=False, enter=lambda *bucket: None)
    with replica.pass_(first=True, last=False):
        assert model.weight.grad is None and settled == []
        model.weight.sum()
        assert settled == [0]
    replica.close()


@pytest.mark.slow
def test_evaluates_weights_and_their_averages(tmp_path: Path) -> None:
    ran = (*COMMON, *CASES["sgd"], "train.max_steps=20", "ema.decay=0.9", "train.eval_every_epochs=1")
    ddp = run_ranks(train, 2, *ran, "strategy=ddp", f"run_dir={tmp_path}/ddp", init=False)[0]
    ps = run_ranks(train, 3, *ran, *PS, f"run_dir={tmp_path}/ps", init=False)[0]
    for name in ("train/loss", "eval/loss", "eval/ema/loss", "eval/accuracy"):
        assert ps[name] == pytest.approx(ddp[name], rel=1e-4), name
    assert abs(ps["eval/loss"] - ps["eval/ema/loss"]) > 1e-2


@pytest.mark.slow
def test_a_dead_worker_is_named(tmp_path: Path) -> None:
    killed = fault("kill", rank=2, step=5)
    with pytest.raises(RankFailure):
        run_ranks(train, 3, *COMMON, *CASES["sgd"], *PS, *killed, f"run_dir={tmp_path}", init=False)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["rank"], failure["step"]) == (2, 5), failure


def until_refused(root: str, *overrides: str) -> tuple[set[int], tuple[int, ...], int]:
    """Train up to a gradient that is not finite: the updates made here, the named rank, the status."""
    with context_of(*overrides, f"run_dir={root}") as context:
        with pytest.raises(NonFiniteError) as refused:
            fit(context)
        states = context.state.optimizer.state.values()
        updates = {int(cast(Tensor, own["step"])) for own in states}
        return updates, refused.value.ranks, refused.value.exit_code


@pytest.mark.slow
def test_a_gradient_with_a_nan_in_the_rows_of_one_server_is_applied_by_none(tmp_path: Path) -> None:
    model = ("model._target_=tests.user_parts.NanInItsLastRow", *(f"~model.{name}" for name in MLP))
    every_step = ("checkpoint.every_steps=1", "checkpoint.keep_last=1")
    ran = (*COMMON, *model, *ADAMW, *PS, "strategy.servers=2", *every_step)
    for rank, found in enumerate(run_ranks(until_refused, 3, str(tmp_path), *ran, init=False)):
        assert found == ({2} if rank < 2 else set(), (2,), 3), rank
    saved = (tmp_path / "checkpoints").glob("step_*")
    assert [path.name for path in saved] == ["step_00000002"]


def stop_after_the_first_log(root: str, *overrides: str) -> int:
    """Signal the last rank as soon as there are metrics; return the step after which this rank stopped."""

    def tell() -> None:
        while not (Path(root) / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    if int(os.environ["RANK"]) == 2:
        threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(StoppedBySignal) as stopped:
        train(*overrides, f"run_dir={root}")
    return stopped.value.step


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_a_whole_step(tmp_path: Path) -> None:
    ran = (*COMMON, *CASES["sgd"], *PS, "train.epochs=100000")
    endless = ("train.max_steps=1000000", "schedule=constant")
    steps = run_ranks(stop_after_the_first_log, 3, str(tmp_path), *ran, *endless, init=False)
    assert steps == [steps[0]] * 3
    on = ("resume=auto", f"train.max_steps={steps[0] + 10}", "schedule=constant", f"run_dir={tmp_path}")
    assert run_ranks(train, 3, *ran, *on, init=False)[0]["steps"] == steps[0] + 10


class Counting(nn.Module):
    """Digits; counts its passes in a buffer that it assigns, and in its extra state; `late`: what it creates then."""

    def __init__(self, late: str = "") -> None:
        super().__init__()
        self.head, self.passes, self.late = nn.Linear(64, 10), 0, late
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scale", torch.zeros(1))

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.passes])

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.scale = self.scale + 1
            match self.late:
                case "buffer":
                    self.register_buffer("made", torch.ones(2), persistent=False)
                case "layer":
                    self.layer = nn.Linear(2, 2)
                case "teacher":
                    self.teacher.weight.mul_(0.5)
        return self.head(images.flatten(1) * (1 + self.scale / 10))


COUNTING = ("model._target_=tests.strategies.test_parameter_server.Counting", *(f"~model.{n}" for n in MLP))


def counted(root: str, *overrides: str) -> tuple[list[set[float]], list[str]]:
    """The counts at the end of a run and of a resumed one on this rank; and the refusals of late creations."""
    ran, found = (*COMMON, *COUNTING, *SGD, *PS, *overrides, "checkpoint.every_steps=2"), []
    for steps in (4, 6):
        go_on = (f"run_dir={root}/run", "resume=auto", f"train.max_steps={steps}", "schedule=constant")
        with context_of(*ran, *go_on) as context:
            fit(context)
            model = cast(Any, context.strategy.unwrap(context.model))
            saved = context.state.model.state_dict()
            found.append({model.passes, *map(float, (model.scale, saved["scale"], saved["_extra_state"]))})
    refusals = []
    for late in ("buffer", "layer", "teacher"):
        own = (f"+model.late={late}", f"run_dir={root}/{late}")
        with pytest.raises(UserError) as refused, context_of(*ran, *own) as context:
            fit(context)
        refusals.append(f"{refused.value} after step {context.state.progress.step}")
        torch.distributed.destroy_process_group()
    return found, refusals


@pytest.mark.slow
def test_what_a_forward_pass_keeps_comes_to_the_servers_or_is_refused(tmp_path: Path) -> None:
    buffer = "differs from rank 0 in the buffer made: 'torch.float32 of (2,)' against None"
    layer = "a forward or backward pass or the loss makes or changes layer.bias, layer.weight: no server"
    words = [
        buffer,
        layer,
        "a forward or backward pass or the loss makes or changes teacher.weight: no server",
    ]
    for found, refusals in run_ranks(counted, 3, str(tmp_path), init=False):
        assert found == [{4.0}, {6.0}]
        for expected, refusal in zip(words, refusals, strict=True):
            assert expected in refusal
        assert all(refusal.endswith("after step 0") for refusal in refusals[:3])


class Meeting(nn.Module):
    """Digits; its forward pass calls an all-reduce over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores = self.head(images.flatten(1))
        torch.distributed.all_reduce(scores.detach().sum())
        return scores


@pytest.mark.slow
def test_a_collective_of_the_models_own_is_refused(tmp_path: Path) -> None:
    model = ("model._target_=tests.strategies.test_parameter_server.Meeting", *(f"~model.{n}" for n in MLP))
    ran = (*COMMON, *model, *SGD, *PS, f"run_dir={tmp_path}")
    with pytest.raises(RankFailure):
        run_ranks(train, 2, *ran, init=False)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["status"], failure["rank"]) == (2, 1), failure
    assert "calls a collective of its own (c10d.allreduce_.default)" in failure["message"]


class Unseen(nn.Module):
    """Digits; a use of a parameter that torch shows to no mode, and a copy of a module in the forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.head = how, nn.Linear(64, 32), nn.Linear(32, 10)
        self.alias = self.body.weight.detach()

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        if self.how == "thread":
            with ThreadPoolExecutor(1) as threads:
                return self.head(threads.submit(F.linear, inputs, self.body.weight).result())
        if self.how == "alias":
            return self.head(inputs @ self.alias.t() + self.body(inputs))
        with torch.no_grad():
            target = copy.deepcopy(self.body)(inputs)
        return self.head(self.body(inputs) - 0.5 * target)


def unseen_each(root: str) -> list[tuple[str, list[str]]]:
    """For each use: the error, and the warnings of the worker."""
    found = []
    for how in ("thread", "alias"):
        with warnings_of("trainer.strategies.parameter_server.worker_copy") as warned:
            try:
                train(*COMMON, *UNSEEN_MODEL, f"+model.how={how}", *SGD, *PS, *SMALL, f"run_dir={root}/{how}")
            except NonFiniteError as error:
                found.append((str(error), warned))
        torch.distributed.destroy_process_group()
    return found


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    told, handler = list[str](), logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger(name).removeHandler(handler)


SMALL = ("strategy.bucket_mb=0.0001",)  # each parameter is waited for on its own
UNSEEN_MODEL = ("model._target_=tests.strategies.test_parameter_server.Unseen", *(f"~model.{n}" for n in MLP))


@pytest.mark.slow
def test_a_use_that_is_not_seen_finds_nan_and_not_the_values_of_the_last_step(tmp_path: Path) -> None:
    _, worker = run_ranks(unseen_each, 2, str(tmp_path), init=False)
    assert len(worker) == 2
    for error, warned in worker:
        assert "NaN" in error
        assert "uses parameters where strategy=parameter_server does not see it" in warned[0]


@pytest.mark.slow
def test_a_forward_pass_may_copy_a_module(tmp_path: Path) -> None:
    ran = (*COMMON, *UNSEEN_MODEL, "+model.how=copy", *SGD)
    served = run_ranks(trained, 3, *ran, *PS, f"run_dir={tmp_path}/ps", init=False)[0]
    ddp = run_ranks(
        trained, 2, *ran, "strategy=ddp", "comm=master_worker", f"run_dir={tmp_path}/ddp", init=False
    )[0]
    assert all(torch.equal(ddp[key], served[key]) for key in ddp)
