"""With each torch optimizer and schedule, a resumed run is bit-identical to an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests import runs
from tests.checkpoint import tiny
from tests.checkpoint.whole_runs import SINGLE, differences, run
from tests.failures.test_ends import TINY, refusals
from tests.ranks import run_ranks
from trainer.checkpoint.tree import take_apart
from trainer.distributed.process_group import process_group
from trainer.errors import UserError
from trainer.guards.replicas import ReplicaCheck
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import Progress, TrainState
from trainer.tensors.bits import same_bits

STOP = 4  # within the second epoch
BASE = (
    *(word for word in SINGLE if not word.startswith(("optim", "schedule", "strategy"))),
    "optim=sgd",
    "optim.lr=0.01",
)
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "Adadelta": (),
    "Adafactor": (),
    "Adagrad": ("+optim.lr_decay=0.1",),
    "Adam": ("+optim.amsgrad=true",),
    "Adamax": (),
    "AdamW": (),
    "ASGD": ("+optim.t0=2",),  # averages from the third step on
    "NAdam": (),
    "RAdam": (),
    "RMSprop": ("+optim.momentum=0.9", "+optim.centered=true"),
    "Rprop": (),
    "SGD": ("+optim.momentum=0.9", "+optim.nesterov=true"),
}
_TORCHS = ("~schedule.warmup_steps",)  # conf/schedule/constant.yaml has nothing else
SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": ("schedule.warmup_steps=3",),
    "cosine": (),
    "wsd": (),
    "PolynomialLR": (*_TORCHS, "+schedule.total_iters=auto"),
    "plateau": ("schedule.patience=0", "+schedule.threshold=0.9"),
    "StepLR": (*_TORCHS, "+schedule.step_size=3"),
    "ExponentialLR": (*_TORCHS, "+schedule.gamma=0.9"),
    "CosineAnnealingWarmRestarts": (*_TORCHS, "+schedule.T_0=3"),
}


class Named(torch.optim.SGD):
    """Keeps state of all parameters under a name, and each parameter's last gradients in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = self.state["own"]  # type: ignore[index]
        own["steps"] = own.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                history = self.state[parameter].setdefault("history", [])
                history.append(parameter.grad.clone())
                del history[:-3]
                parameter.sub_(group["lr"] / own["steps"] * sum(history))


class ByRows(torch.optim.SGD):
    """Keeps a number for each row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    self.state[parameter]["rows"] = parameter.grad.square().mean(1)
        super().step()


def _of_users(root: Path, *strategy: str) -> tuple[list[Any], str]:
    """Return an uninterrupted and a resumed run, and the error of a run whose state cannot be resumed."""
    chosen = ("~optim.momentum", "~optim.weight_decay", "train.max_steps=4", "checkpoint.every_steps=2")
    words = (*TINY, *strategy, *chosen, f"optim._target_={__name__}.Named")
    rows = (*TINY, *strategy, *chosen, f"optim._target_={__name__}.ByRows", f"run_dir={root / 'rows'}")
    return runs.whole_and_resumed(root, 2, *words), refusals(rows)[0]


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_state_of_a_custom_optimizer_is_resumed_or_refused_after_one_step(
    tmp_path: Path, strategy: str
) -> None:
    world_size = 1 if strategy == "single" else 2
    for (whole, again), rows in run_ranks(
        _of_users, world_size, tmp_path, f"strategy={strategy}", init=False
    ):
        assert whole == again
        assert "accepted" in rows


def _pairs() -> list[tuple[str, ...]]:
    """Return each optimizer with a schedule, cycling through the schedules."""
    found, schedules = [], list(SCHEDULES)
    for number, (optimizer, options) in enumerate(OPTIMIZERS.items()):
        schedule = schedules[number % len(schedules)]
        names = (f"optim._target_=torch.optim.{optimizer}", "~optim.momentum", "~optim.weight_decay")
        is_torchs = SCHEDULES[schedule][:1] == _TORCHS
        chosen = "constant" if is_torchs else schedule
        target = (f"schedule._target_=torch.optim.lr_scheduler.{schedule}",) if is_torchs else ()
        found.append((f"schedule={chosen}", *names, *options, *target, *SCHEDULES[schedule]))
    return found


def _differences(root: Path, strategy: str) -> dict[str, list[str]]:
    torch.set_num_threads(1)
    found, base = {}, (f"strategy={strategy}", *BASE)
    with process_group(runs.settings(*base).distributed) as ranks:
        pairs = _pairs()
        # Shards differ by the shapes of state alone.
        for number, pair in enumerate(pairs if strategy == "single" else pairs[::4]):
            whole = run(ranks, root / f"{number}", *base, *pair, save_at=[STOP])
            half = str(root / f"{number}" / "checkpoints" / f"step_{STOP:08d}")
            resumed = run(ranks, root / f"{number}-on", *base, *pair, resume=half, save_at=())
            assert differences(resumed["begin"], resumed["end"]), pair
            found[" ".join(pair)] = differences(whole["end"], resumed["end"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("fsdp", 2)])
def test_each_optimizer_and_schedule_resumes_exactly(tmp_path: Path, strategy: str, world_size: int) -> None:
    found = run_ranks(_differences, world_size, tmp_path, strategy, init=False)[0]
    assert len(found) == (12 if strategy == "single" else 3)
    assert {pair: different for pair, different in found.items() if different} == {}


class Odd(torch.optim.Optimizer):
    """Has state of all kinds, for parameters and for the optimizer itself, also in attributes."""

    rate: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.rate = 1.0 if self.rate is None else self.kept[3][0].item() / 2
        self.kept = {3: (torch.tensor(self.rate), None, True), "best": [-0.0, float("inf")]}
        self.state["calls"] = self.state.get("calls", 0) + 1
        self.state["own"].setdefault("sums", [torch.zeros(2)])[0].add_(0.3)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["moment"] = state.get("moment", torch.zeros(parameter.shape)) * 0.9 + parameter.grad.float()
            state["counts"] = torch.tensor([2**60 + self.state["calls"]])
            state["phase"] = [torch.tensor(1j), {"name": "warm", "of": (None, 2**70)}]
            state["name"] = "odd"
            columns = state.setdefault("columns", torch.ones(3, 2).t())
            self.kept[4] = columns.stride()
            sums = state["moment"] + state["both"].a if "both" in state else state["moment"]
            state["both"] = TwoTensor(sums, sums.sqrt())  # several tensors in one, as of 8-bit optimizers
            parameter -= self.rate * self.param_groups[0]["lr"] * state["moment"].to(parameter.dtype)


def _bf16_state() -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = Odd(model.parameters(), {"lr": 0.1})
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return TrainState(
        TrainableParameters(model),
        optimizer,
        schedule,
        torch.amp.GradScaler("cpu", enabled=False),
        Progress(),
    )


def _make_steps(state: TrainState, count: int) -> None:
    for _ in range(count):
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.37) + state.progress.step
        state.optimizer.step()
        state.schedule.step()
        state.progress.advance(12, 48)


def _odd_differences(root: Path) -> tuple[list[str], Any, Any, set[str]]:
    """Return the tensors that differ after four steps with a resume, the other state, and what is hashed."""
    states = [_bf16_state(), _bf16_state()]
    for resumes in (False, True):
        checkpointer = tiny.checkpointer(root)
        assert tiny.restore(checkpointer, states[resumes], "auto") == resumes
        _make_steps(states[resumes], 2)
        if not resumes:
            checkpointer.save(states[0])
            _make_steps(states[0], 2)
    (tensors, plain), (resumed, plain_resumed) = (take_apart(state.state_dict()) for state in states)
    assert tensors.keys() == resumed.keys()
    different = [name for name in tensors if not same_bits(tensors[name], resumed[name])]
    hashed = set(ReplicaCheck(tiny.facts(), [(0,)], every=1)._hashes(states[1]))
    return different, plain, plain_resumed, hashed


def test_state_with_other_dtypes_than_the_parameters_resumes_exactly(tmp_path: Path) -> None:
    """torch's load_state_dict would cast it to the parameter's dtype, and turn a string into a generator."""
    different, whole, resumed, hashed = run_ranks(_odd_differences, 1, tmp_path)[0]
    assert different == []
    assert whole == resumed
    assert {"moment of weight", "both.a of weight", "both.b of bias"} <= hashed


def _sharded() -> str:
    """Return the error of saving a sharded model whose optimizer uses a tensor subclass."""
    state = tiny.train_state(sharded=True)
    for own in state.trainable.own.values():
        state.optimizer.state[own]["both"] = TwoTensor(own.detach(), own.detach())
    with pytest.raises(UserError) as raised:
        state.state_dict()
    return str(raised.value)


@pytest.mark.slow
def test_tensor_subclasses_in_optimizer_state_are_refused_under_fsdp() -> None:
    said = run_ranks(_sharded, 2)[1]
    assert (
        "a TwoTensor, a tensor subclass that contains several tensors, which a checkpoint cannot shard"
        in said
    )
