"""Checkpoints contain no new NaN or Inf, so that resume=auto never continues from a diverged state."""

from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.savable import not_finite
from trainer.errors import NonFiniteError
from trainer.state.train_state import TrainState
from trainer.tensors.local_shard import to_local

NAN, INF = float("nan"), float("inf")


def _state(sharded: bool, seed: int = 0) -> TrainState:
    """Return a state with averages, and with masks of -inf from the start, one of them trainable."""
    state = tiny.train_state(sharded, seed=seed)
    state.keep_average(0.9, warmup=True)
    state.model.register_buffer("mask", torch.full((2, 2), -INF).triu(1))
    state.model.register_parameter("bias_mask", nn.Parameter(torch.tensor([0.0, -INF])))
    with_masks = tiny.state_of(state.model)
    with_masks.average = state.average
    return with_masks


def _poison(state: TrainState, what: str, value: float) -> None:
    """Overwrite the last element of a tensor, which is on the last rank if it is sharded."""
    weight = state.trainable.own["first.weight"]
    tensor = {
        "first.weight": weight,
        "optimizer.state.first.weight.exp_avg": state.optimizer.state[weight]["exp_avg"],
        "ema.weights.first.weight": dict(state.average.named_parameters())["first.weight"],
        "norm.running_var": state.model.norm.running_var,
    }[what]
    is_sharded = state.trainable.is_sharded and "first" in what
    if not is_sharded or torch_dist.get_rank() == torch_dist.get_world_size() - 1:
        to_local(tensor).detach().view(-1)[-1] = value


POISONS = [
    ("first.weight", INF),
    ("optimizer.state.first.weight.exp_avg", NAN),
    ("ema.weights.first.weight", -INF),
    ("norm.running_var", NAN),
]


def _refused(run_dir: Path, sharded: bool, async_: bool) -> list[str]:
    """Save a good step, then a bad step for each poison; return the error message of each."""
    messages = []
    for what, value in POISONS:
        state = _state(sharded)
        checkpointer = tiny.checkpointer(run_dir / what, async_=async_, state=state)
        tiny.train(state, 1)
        state.update_average()
        checkpointer.save(state)
        tiny.train(state, 1, before_update=checkpointer.saving.wait_until_copied)
        _poison(state, what, value)
        with pytest.raises(NonFiniteError) as refusal:
            checkpointer.save(state)
        checkpointer.saving.wait()
        messages.append(str(refusal.value))
        other = _state(sharded, seed=7)
        again = tiny.checkpointer(run_dir / what)
        assert tiny.restore(again, other, "auto") and other.progress.step == 1
    return messages


@pytest.mark.parametrize(
    ("sharded", "async_"), [(False, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_what_is_not_finite_is_not_saved(tmp_path: Path, sharded: bool, async_: bool) -> None:
    ranks = run_ranks(_refused, 2, tmp_path, sharded, async_)
    assert ranks[0] == ranks[1]
    for (what, _), message in zip(POISONS, ranks[0], strict=True):
        on = 1 if sharded and "first" in what else 0
        assert message.startswith(
            f"{what} contains NaN or Inf after step 2 on rank {on} (host 0), so no checkpoint of this step "
            "was saved"
        ), message
        assert [path.name for path in (tmp_path / what / "checkpoints").glob("step*")] == ["step_00000001"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_tensors_with_nan_or_inf_are_named(dtype: torch.dtype) -> None:
    tensors = {
        "fine": torch.tensor([torch.finfo(dtype).max] * 3, dtype=torch.float64).to(dtype),
        "none": torch.empty(0, dtype=dtype),
        "whole": torch.ones(3, dtype=torch.int64),
        "scalar": torch.tensor(1.0).to(dtype),
    }
    assert not_finite(tensors) == []
    bad = {"nan": [1, NAN], "inf": [INF, 1], "minus": [[-INF]], "both": [NAN, INF], "one": NAN}
    tensors |= {name: torch.tensor(values).to(dtype) for name, values in bad.items()}
    assert not_finite(tensors) == list(bad)
