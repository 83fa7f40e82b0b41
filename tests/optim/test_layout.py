"""Fused steps on a CPU, whose kernel assumes one layout for a parameter, its gradient and its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer
from trainer.optim.schedules import constant
from trainer.state.train_state import Progress, TrainState

LAST = torch.channels_last


def state_of(target: str, fused: bool, memory_format: torch.memory_format = LAST) -> TrainState:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = build_optimizer(
        TrainableParameters(model), {"_target_": f"torch.optim.{target}", "lr": 0.1, "fused": fused}
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(TrainableParameters(model), optimizer, constant(optimizer), scaler, Progress())


def step(state: TrainState, memory_format: torch.memory_format = LAST) -> torch.Tensor:
    """Return the weight after a step in which user code has chosen the layout of the gradient."""
    weight: Any = state.model.weight
    weight.grad = weight.detach().square().contiguous(memory_format=memory_format)
    state.optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("fused", [True, False])
def test_restored_state_has_the_parameters_memory_format(fused: bool) -> None:
    """The layout of a checkpoint does not depend on the layout in the run."""
    first = state_of("AdamW", fused)
    step(first)
    saved = first.state_dict()
    moments = saved["optimizer"]["state"]["weight"]
    saved["optimizer"]["state"]["weight"] = {
        name: each.clone(memory_format=torch.contiguous_format) for name, each in moments.items()
    }
    resumed = state_of("AdamW", fused)
    resumed.load_state_dict(saved)
    assert torch.equal(step(resumed), step(first))
    (own,) = resumed.optimizer.state.values()
    assert own["exp_avg"].is_contiguous(memory_format=LAST)


def test_a_non_dense_parameter_is_not_fused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])
    optim = {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert not build_optimizer(TrainableParameters(model), optim).defaults["fused"]


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {}])
def test_a_parameter_may_get_its_first_gradient_in_a_later_step(options: dict[str, float]) -> None:
    def trained(**more: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        settings = {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.1, **options, **more}
        optimizer = build_optimizer(TrainableParameters(model), settings)
        for last in (1, 2, 2):
            optimizer.zero_grad()
            nn.Sequential(*model[:last])(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(trained(), trained(foreach=False))
