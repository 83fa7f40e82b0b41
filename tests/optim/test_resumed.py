"""Optimizer and schedule after a resume: saved options, and options whose settings have changed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer
from trainer.optim.schedules import ScheduleFacts, build_schedule, settings_of
from trainer.state.train_state import Progress, TrainState

TORCH = "torch.optim.lr_scheduler."


class Doubling(LRScheduler):
    """Also changes the momentum, as a user's schedule may."""

    def __init__(self, optimizer: Any, every: int = 3) -> None:
        self.every = every
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.5 + 0.01 * min(self.last_epoch, 20)
        doubles = self.last_epoch > 0 and self.last_epoch % self.every == 0
        return [group["lr"] * (2 if doubles else 1) for group in self.optimizer.param_groups]


class Adapting(torch.optim.SGD):
    """Changes its own options during training."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["dampening"] += 0.01
            group["weight_decay"] *= 0.9


class Counting(torch.optim.SGD):
    def __init__(self, params: Any, begin: int, **options: Any) -> None:
        super().__init__(params, **options)
        self.count = begin

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1


CONSTANT = {"_target_": "trainer.optim.schedules.constant", "warmup_steps": 9}
NODES: list[dict[str, Any]] = [
    CONSTANT,
    {"_target_": "trainer.optim.schedules.cosine", "total_steps": "auto"},
    {"_target_": TORCH + "StepLR", "step_size": 2, "gamma": 0.5},
    {"_target_": TORCH + "CosineAnnealingLR", "T_max": "auto", "eta_min": 1e-3},
    {"_target_": TORCH + "OneCycleLR", "max_lr": 0.3, "total_steps": "auto"},
    {"_target_": TORCH + "CyclicLR", "base_lr": 0.01, "max_lr": 0.3, "step_size_up": 3},
    {"_target_": __name__ + ".Doubling"},
    {
        "_target_": TORCH + "SequentialLR",
        "milestones": [3],
        "schedulers": [
            {"_target_": TORCH + "LinearLR", "_partial_": True, "total_iters": 3},
            {"_target_": TORCH + "ExponentialLR", "gamma": 0.9},
        ],
    },
]


def _state(node: dict[str, Any], total: int = 20, **optim: Any) -> TrainState:
    torch.manual_seed(0)
    trained, facts = TrainableParameters(nn.Linear(2, 2)), ScheduleFacts(total, 5)
    chosen = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "no_decay": None, "groups": []}
    optimizer = build_optimizer(trained, chosen | optim)
    schedule = build_schedule(node, optimizer, facts)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(trained, optimizer, schedule, scaler, Progress(), settings_of(node, facts))


def _train(state: TrainState, steps: int) -> list[Any]:
    """Return the options of the first group at each update."""
    seen = []
    for _ in range(steps):
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        seen.append({key: value for key, value in state.optimizer.param_groups[0].items() if key != "params"})
        state.optimizer.step()
        state.count_update(True)
        state.progress.advance(1, 99)
    return seen


def _resumed(saver: TrainState, state: TrainState, steps: int = 7) -> TrainState:
    _train(saver, steps)
    state.load_state_dict(copy.deepcopy(saver.state_dict()))
    return state


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("node", NODES, ids=lambda node: node["_target_"].rpartition(".")[2])
@pytest.mark.parametrize(("lr", "total"), [(0.1, 20), (0.01, 20), (0.1, 40)])
def test_a_resumed_schedule_equals_one_with_the_new_settings(
    node: dict[str, Any], lr: float, total: int
) -> None:
    resumed, whole = _resumed(_state(node), _state(node, total, lr=lr)), _state(node, total, lr=lr)
    assert _train(resumed, 5) == _train(whole, 12)[7:]


def test_a_new_schedule_starts_at_the_current_step_and_restores_momentum() -> None:
    cycles = {"_target_": TORCH + "OneCycleLR", "max_lr": 0.3, "total_steps": "auto", "max_momentum": 0.9}
    for was, node in (
        (cycles, CONSTANT),
        (CONSTANT, cycles),
        ({"_target_": __name__ + ".Doubling"}, CONSTANT),
    ):
        assert _train(_resumed(_state(was), _state(node)), 5) == _train(_state(node), 12)[7:]
    slower = {"_target_": __name__ + ".Doubling", "every": 5}
    assert _train(_resumed(_state(NODES[7]), _state(slower)), 5) == _train(_state(slower), 12)[7:]


def test_options_that_an_optimizer_changed_are_kept_unless_their_setting_changed() -> None:
    adapts = {"_target_": __name__ + ".Adapting", "weight_decay": 0.5}
    whole, resumed = (
        _state(CONSTANT, **adapts),
        _resumed(_state(CONSTANT, **adapts), _state(CONSTANT, **adapts)),
    )
    assert _train(whole, 12)[7:] == _train(resumed, 5)
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    other = _resumed(_state(CONSTANT, **adapts), _state(CONSTANT, **adapts | {"weight_decay": 0.2}))
    (options,) = _train(other, 1)
    assert options["weight_decay"] == 0.2 and options["dampening"] == pytest.approx(0.07)


def test_an_attribute_is_restored_unless_its_setting_changed(caplog: pytest.LogCaptureFixture) -> None:
    counting = {"_target_": f"{__name__}.Counting", "begin": 3}
    for begin, count in (3, 10), (5, 5):
        state = _resumed(_state(CONSTANT, **counting), _state(CONSTANT, **counting | {"begin": begin}))
        assert state.optimizer.count == count
    assert [
        "the saved value of optimizer.count is not restored" in r.getMessage() for r in caplog.records
    ] == [True]


def test_state_is_kept_if_groups_change() -> None:
    no_decay = {"no_decay": {"match": None, "below_dims": 2}}
    one, two = {"weight_decay": 0.0}, {"weight_decay": 0.1}
    for was, now, decays in ((one, two, [0.1, 0.0]), (two, one, [0.0])):
        saver = _state(CONSTANT, **was, **no_decay)
        resumed = _resumed(saver, _state(CONSTANT, **now, **no_decay))
        assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == decays
        kept = [
            state.optimizer.state[parameter]["momentum_buffer"]
            for state in (saver, resumed)
            for parameter in state.model.parameters()
        ]
        assert all(map(torch.equal, kept[:2], kept[2:]))


@pytest.mark.parametrize("lr", [0.1, 0.02])
def test_plateau_keeps_the_reduced_rate_and_uses_new_settings(lr: float) -> None:
    node = {"_target_": TORCH + "ReduceLROnPlateau", "patience": 0, "factor": 0.5}
    saver, state = _state(node), _state(node | {"factor": 0.1}, lr=lr)
    for _ in range(3):
        saver.after_evaluation({"eval/loss": 1.0})
    _resumed(saver, state)
    (rate,) = (group["lr"] for group in state.optimizer.param_groups)
    assert rate == pytest.approx(lr / 4)
    state.after_evaluation({"eval/loss": 1.0})
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(lr / 40)
