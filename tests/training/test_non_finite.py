"""No rank updates with gradients that are not finite, under any strategy, with any all-reduce."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.runs import context_of
from tests.strategies.test_comm_hook import POWERSGD
from tests.updates import run_of, update
from trainer.errors import NonFiniteError
from trainer.loop import fit
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import Progress, TrainState

# The third loss of the last rank is finite, and its slope NaN.
SLOPE = (
    "logger=jsonl",
    *("data.task._target_=tests.user_parts.FailsAt", "~data.task.label_smoothing", "+data.task.call=3"),
    *("+data.task.how=slope", "train.max_steps=4", "train.eval_every_epochs=0"),
    *("schedule=constant", "train.log_every_steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9"),
)
CLIPPED = ("train.clip_grad_norm=1.0", "train.log_every_steps=50")
UNLOGGED = ("train.log_every_steps=50",)
# On every rank, and then in the shard of the last one alone.
ONE_ROW = ("model._target_=tests.user_parts.NanInItsLastRow", "data.task.call=99")
ONE_ROW += ("~model.hidden", "~model.input_shape", "~model.num_classes")
SERVED = ("strategy=parameter_server", "distributed.timeout_s=60")
ALONE = {
    "single": ("strategy=single",),
    "single_clipped": ("strategy=single", *CLIPPED),
    "single_fused": ("strategy=single", "optim=adamw", "+optim.fused=true"),
    "dp_in_bf16": ("strategy=dp", "train.precision=bf16"),
    "fsdp": ("strategy=fsdp", *UNLOGGED),
}
TOGETHER = {
    "native": ("strategy=ddp",),
    "some_unused": ("strategy=ddp", "strategy.find_unused_parameters=true", *UNLOGGED),
    "ring": ("strategy=ddp", "comm=ring", *UNLOGGED),
    "hierarchical_in_bf16": ("strategy=ddp", "comm=hierarchical", "comm.wire_dtype=bf16", *UNLOGGED),
    "powersgd": ("strategy=ddp", *POWERSGD, *UNLOGGED),
    "fsdp": ("strategy=fsdp", *UNLOGGED),
    "fsdp_one_row": ("strategy=fsdp", *ONE_ROW, *UNLOGGED),
    "fsdp_clipped": ("strategy=fsdp", *CLIPPED),
    "fsdp_in_bf16": ("strategy=fsdp", "train.precision=bf16", *UNLOGGED),
    "server": (*SERVED, "strategy.servers=1", *UNLOGGED),
    "all_serve": (*SERVED, "strategy.servers=all", *CLIPPED),
    "all_serve_one_row": (*SERVED, "strategy.servers=all", *ONE_ROW, *UNLOGGED),
}


def local(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def until_refused(run_dir: Path, *overrides: str) -> dict[str, Any]:
    updates: list[list[Tensor]] = []
    with context_of(*SLOPE, *overrides, f"run_dir={run_dir}") as context:
        state, count_update = context.state, context.state.count_update

        def noted(is_made: bool) -> None:
            count_update(is_made)
            updates.append([local(p).clone() for p in state.model.parameters()])

        state.count_update = noted  # type: ignore[method-assign]
        with pytest.raises(NonFiniteError) as refused:
            fit(context)
        now = map(local, state.model.parameters())
        same = all(torch.equal(a, b) for a, b in zip(updates[-1], now, strict=True))
        return {"error": refused.value, "updates": len(updates), "same": same}


def each_until_refused(root: Path, cases: dict[str, tuple[str, ...]], last: int) -> dict[str, dict[str, Any]]:
    rank = f"+data.task.rank={last}"
    return {name: until_refused(root / name, rank, *overrides) for name, overrides in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "last"), [(ALONE, 0), (TOGETHER, 1)], ids=["alone", "together"])
def test_no_rank_updates_with_a_non_finite_gradient(
    cases: dict[str, tuple[str, ...]], last: int, tmp_path: Path
) -> None:
    ranks = run_ranks(each_until_refused, last + 1, tmp_path, cases, last, hosts=range(last + 1), init=False)
    for name in cases:
        for rank in ranks:
            found, error = rank[name], rank[name]["error"]
            assert (found["updates"], found["same"], error.exit_code) == (2, True, 3), name
            known = not last
            where = f"rank {last} (host {last})" if known else "some rank"
            what = "head.weight" if "one_row" in name else "1.weight (and 5 more)"
            said = f"the gradient of {what} is NaN or Inf in step 3 on {where}; no rank applied the update"
            assert str(error).startswith(said), (name, str(error))
            assert error.ranks == ((last,) if known else ()), name
        saved = (tmp_path / name / "checkpoints").glob("step_*")
        assert sorted(path.name for path in saved) == ["step_00000001", "step_00000002"], name


# ---- one rank's check


def checked(gradients: list[Tensor], **options: Any) -> nn.Module:
    """Make or skip a step with these gradients."""
    model = nn.ParameterList([torch.zeros_like(gradient.to_dense()) for gradient in gradients])
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    off = torch.amp.GradScaler(enabled=False)
    update(run_of(TrainState(TrainableParameters(model), optimizer, schedule, off, Progress())), step=7)
    return model


def rows(*values: float) -> Tensor:
    return torch.sparse_coo_tensor(
        [[2] * len(values)], torch.tensor(values)[:, None], (4, 1), check_invariants=True
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "gradient", [torch.ones(3), torch.ones(3).half(), torch.ones(3, dtype=torch.complex64), rows(1.0, 2.0)]
)
def test_a_single_non_finite_element_is_found(gradient: Tensor, bad: float) -> None:
    found = gradient.clone()
    (found._values() if found.is_sparse else found)[1] = bad
    with pytest.raises(NonFiniteError, match=r"the gradient of 1 is NaN or Inf in step 7 on here"):
        checked([torch.ones(3), found])


def test_clipping_does_not_zero_gradients_whose_norm_overflows() -> None:
    with pytest.raises(NonFiniteError, match="the norm of the gradients, each of which is finite, is NaN or"):
        checked([torch.tensor([1e20, 1e20])])
    assert torch.equal(checked([torch.ones(2), rows(1.0, 2.0)])[0], -torch.ones(2))
