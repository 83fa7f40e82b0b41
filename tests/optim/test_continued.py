"""A schedule and an optimizer after a resume: this run's settings, at the saved run's place."""

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.schedules import (
    ScheduleFacts,
    after_evaluation,
    after_step,
    build_schedule,
    continue_schedule,
)

TORCH = "torch.optim.lr_scheduler."
NODES = [
    {"_target_": "trainer.optim.schedules.constant", "warmup_steps": 9},
    {"_target_": "trainer.optim.schedules.cosine", "total_steps": "auto"},
    {"_target_": "trainer.optim.schedules.wsd", "total_steps": "auto"},
    {"_target_": "trainer.optim.schedules.one_cycle", "total_steps": "auto"},
    {"_target_": TORCH + "StepLR", "step_size": 2, "gamma": 0.5},
    {"_target_": TORCH + "CosineAnnealingLR", "T_max": "auto", "eta_min": 1e-3},
    {"_target_": TORCH + "OneCycleLR", "max_lr": 0.3, "total_steps": "auto"},
    {
        "_target_": TORCH + "SequentialLR",
        "milestones": [3],
        "schedulers": [
            {"_target_": TORCH + "LinearLR", "total_iters": 3},
            {"_target_": TORCH + "ExponentialLR", "gamma": 0.9},
        ],
    },
]


def _built(node: dict, lr: float, total: int = 20) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)
    return optimizer, build_schedule(node, optimizer, ScheduleFacts(total, 5))


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("node", NODES, ids=lambda node: node["_target_"].rpartition(".")[2])
@pytest.mark.parametrize(("lr", "total"), [(0.1, 20), (0.01, 20), (0.1, 40)])
def test_a_continued_schedule_is_where_a_run_of_its_settings_would_be(node, lr, total):
    (saver, saved), (wanted, whole) = _built(node, 0.1), _built(node, lr, total)
    optimizer, schedule = _built(node, lr, total)
    for _ in range(7):
        after_step(saved)
        after_step(whole)
    continue_schedule(schedule, saved.state_dict(), saver.param_groups, 7)
    for _ in range(5):
        mine, theirs = optimizer.param_groups[0], wanted.param_groups[0]
        assert {**mine, "params": 0} == {**theirs, "params": 0}
        after_step(schedule)
        after_step(whole)


@pytest.mark.parametrize("lr", [0.1, 0.02])
def test_a_plateau_keeps_what_it_lowered_and_takes_new_settings(lr):
    node = {"_target_": TORCH + "ReduceLROnPlateau", "patience": 0, "factor": 0.5}
    (saver, saved), (optimizer, schedule) = _built(node, 0.1), _built(node | {"factor": 0.1}, lr)
    for _ in range(3):
        after_evaluation(saved, {"eval/loss": 1.0})
    continue_schedule(schedule, saved.state_dict(), saver.param_groups, 7)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 4) and schedule.factor == 0.1
    after_evaluation(schedule, {"eval/loss": 1.0})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 40)
