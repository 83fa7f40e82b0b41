"""The state of a run: its progress, and state dicts with the plain module's names."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.checkpoint import tiny
from tests.updates import run_of, update
from trainer.checkpoint.tree import put_together, take_apart
from trainer.model.plain_names import load_model_state, model_state, parameter_names
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.progress import Update
from trainer.state.train_state import Progress, TrainState


def test_progress_counts_steps_epochs_and_samples() -> None:
    progress = Progress()
    seen = []
    for _ in range(7):
        progress.advance(global_batch_size=10, data_left=39 - progress.samples_in_epoch >= 20)
        seen.append((progress.step, progress.epoch, progress.samples_in_epoch, progress.samples_seen))
    assert seen[:4] == [(1, 0, 10, 10), (2, 0, 20, 20), (3, 1, 0, 30), (4, 1, 10, 40)]
    assert seen[6] == (7, 2, 10, 70)


def test_progress_counts_remaining_steps_with_another_batch_size() -> None:
    progress = Progress(step=3, samples_in_epoch=30, samples_seen=30)
    for batch_size, position, steps in (
        (5, (0, 30), 2 + 2 * 8),
        (10, (0, 30), 1 + 2 * 4),
        (16, (1, 0), 2 * 2),
    ):
        here = dataclasses.replace(progress)
        here.skip_short_rest(batch_size, 43)
        assert (here.epoch, here.samples_in_epoch) == position
        assert here.steps_to_go(3, batch_size, 43) == steps
        for _ in range(steps):
            assert here.epoch < 3
            here.advance(batch_size, data_left=43 - here.samples_in_epoch >= 2 * batch_size)
        assert (here.epoch, here.samples_in_epoch, here.steps_to_go(3, batch_size, 43)) == (3, 0, 0)


def _step(state: Any) -> None:
    state.model(torch.ones(4, 5)).sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("steps", [0, 3])
def test_state_dict_can_be_loaded(optimizer: str, steps: int) -> None:
    """Before the first step, without state, and with an unused parameter, too.

    torch.distributed.checkpoint.state_dict does not support these.
    """
    state, fresh = tiny.train_state(optimizer=optimizer), tiny.train_state(seed=1, optimizer=optimizer)
    for _ in range(steps):
        _step(state)
    before = copy.deepcopy(state.state_dict())
    fresh.load_state_dict(copy.deepcopy(before))
    for state_of in (state, fresh):
        tensors, plain = take_apart(state_of.state_dict())
        expected_tensors, expected_plain = take_apart(before)
        assert plain == expected_plain
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected_tensors.items())
    assert "unused" not in before["optimizer"]["state"]
    assert (optimizer == "sgd" or steps == 0) == (not any(before["optimizer"]["state"].values()))


@pytest.mark.slow
def test_the_state_of_a_wrapped_model_equals_torchs() -> None:
    net = tiny.Net()
    net.first = checkpoint_wrapper(net.first)  # type: ignore[assignment]
    net = torch.compile(net)  # type: ignore[assignment]
    ours, torchs = model_state(net), get_model_state_dict(net)
    assert ours.keys() == torchs.keys() == tiny.Net().state_dict().keys()
    assert all(ours[name].data_ptr() == torchs[name].data_ptr() for name in ours)


def test_modules_get_their_saved_version() -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            assert metadata.get("version") == 2
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    model, other = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    load_model_state(model, model_state(other))
    assert torch.equal(model[0].weight, other[0].weight)


def test_tied_weights_have_one_optimizer_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    assert [name for name, _ in parameter_names(Tied())] == ["embed.weight"]


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_in_fp16_changes_no_weight_momentum_or_average(fused: bool) -> None:
    layer = nn.Linear(64, 64)
    alone = copy.deepcopy(layer)
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1, 0.9, fused=fused) for m in (layer, alone))
    scaler, schedule = torch.amp.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = TrainState(TrainableParameters(layer), optimizer, schedule, scaler, Progress())
    state.keep_average(0.5, warmup=False)
    assert state.average is not None
    run = run_of(state)
    for gradient in (math.inf, 1.0, math.nan, 1.0):
        memory = [torch.full((64, 64), math.nan) for _ in range(8)]
        del memory  # so that new memory holds no zeros
        scale = scaler.scale(torch.ones(())).item()
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, gradient * scale)
        is_made = math.isfinite(gradient)
        assert update(run) is (Update.MADE if is_made else Update.OVERFLOW)
        for parameter in alone.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        if is_made:
            plain.step()
    for name, value in alone.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name), value)
    assert state.average.state_dict()["num_updates"] == state.progress.skipped_steps == 2


class Lookahead(torch.optim.SGD):
    """Has its own state_dict, with two more keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls, self.slow = 0, torch.zeros(3)

    def step(self, closure: Any = None) -> None:
        self.calls, self.slow = self.calls + 1, self.slow + 0.5
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lookahead": {"calls": self.calls, "slow": self.slow}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.calls, self.slow = saved["lookahead"]["calls"], saved["lookahead"]["slow"]


def test_additional_keys_of_an_optimizers_state_dict_are_saved() -> None:
    state, fresh = tiny.train_state(), tiny.train_state()
    for of in (state, fresh):
        of.optimizer = Lookahead(of.model.parameters())
    for _ in range(3):
        state.optimizer.step()
    tensors, plain = take_apart(state.state_dict())
    fresh.load_state_dict(put_together(plain, {name: tensor.clone() for name, tensor in tensors.items()}))
    assert isinstance(fresh.optimizer, Lookahead)
    assert fresh.optimizer.calls == 3
    assert fresh.optimizer.slow.tolist() == [1.5, 1.5, 1.5]
