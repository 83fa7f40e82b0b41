"""train.skip_nonfinite: all ranks skip non-finite steps, which do not change any state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.runs import context_of
from trainer.errors import NonFiniteError
from trainer.loop import fit
from trainer.run_dir.metrics_file import read_metrics

# The third loss of the last rank is NaN, or its slope alone.
FAILS = (
    "logger=jsonl",
    *("data.task._target_=tests.user_parts.FailsAt", "~data.task.label_smoothing", "+data.task.call=3"),
    *("+data.task.how='nan'", "train.max_steps=6", "train.eval_every_epochs=0", "train.log_every_steps=2"),
    *("schedule=constant", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "ema.decay=0.9"),
    *("distributed.timeout_s=60", "train.skip_nonfinite=1"),
)
SLOPE, SOUND = "data.task.how=slope", "data.task.call=99"
ALONE = {
    "loss": ("strategy=single",),
    "slope": ("strategy=single", SLOPE),
    "clipped": ("strategy=single", SLOPE, "train.clip_grad_norm=1.0"),
    "accumulated": ("strategy=single", "train.micro_batch_size=32", "data.task.call=6"),
}
TOGETHER = {
    "ddp": ("strategy=ddp",),
    "ddp_slope": ("strategy=ddp", "comm=ring", SLOPE),
    "fsdp": ("strategy=fsdp",),
    "fsdp_slope": ("strategy=fsdp", SLOPE),
    "fsdp_clipped": ("strategy=fsdp", SLOPE, "train.clip_grad_norm=1.0"),
    "exact": ("strategy=ddp", "train.exact=2", SLOPE),
    "servers": ("strategy=parameter_server", "strategy.servers=all", SLOPE),
}


def everything(context: Any) -> dict[str, Tensor]:
    """Return copies of this rank's parameters, buffers, averages and optimizer state."""
    state, found = context.state, dict(context.state.model.state_dict())
    found |= {f"ema.{name}": value for name, value in state.average.named_parameters()}
    found |= {f"optim.{name}": value for name, value in state.replicated()}
    return {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in found.items()}


def fitted(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Train to the end; return the state after each update or skip, and the result."""
    after: list[dict[str, Tensor]] = []
    with context_of(*FAILS, *overrides, f"run_dir={run_dir}") as context:
        count_update = context.state.count_update

        def noted(is_made: bool) -> None:
            count_update(is_made)
            after.append(everything(context))

        context.state.count_update = noted  # type: ignore[method-assign]
        result = fit(context)
        return {"after": after, "result": result, "progress": context.state.progress}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def each(root: Path, cases: dict[str, tuple[str, ...]], last: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, overrides in cases.items():
        words = (f"+data.task.rank={last}", *overrides)
        found[name] = fitted(root / name, *words)
        saved = root / name / "checkpoints" / "step_00000003"
        on = fitted(root / f"{name}-on", *words, SOUND, f"resume={saved}")
        found[name]["resumed"] = same(found[name]["after"][-1], on["after"][-1])
        found[name]["counted"] = on["result"]["skipped_steps"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "last"), [(ALONE, 0), (TOGETHER, 1)], ids=["alone", "together"])
def test_all_ranks_skip_a_non_finite_step(
    cases: dict[str, tuple[str, ...]], last: int, tmp_path: Path
) -> None:
    ranks = run_ranks(each, last + 1, tmp_path, cases, last, init=False)
    for name in cases:
        for rank in ranks:
            after, result, progress = (rank[name][key] for key in ("after", "result", "progress"))
            assert len(after) == 6 and same(after[1], after[2]), name
            assert not same(after[0], after[1]) and not same(after[2], after[3]), name
            assert all(value.isfinite().all() for value in after[-1].values()), name
            assert (result["skipped_steps"], progress.skipped_in_a_row, progress.step) == (1, 0, 6), name
            assert 0 < result["train/loss"] < 10, name
            assert rank[name]["resumed"] and rank[name]["counted"] == 1, name
        logged = read_metrics(tmp_path / name)
        assert logged["train/skipped_steps"] == {4: 1.0, 6: 1.0}, name
        assert all(0 < loss < 10 for loss in logged["train/loss"].values()), name


def too_many(root: Path) -> list[str]:
    """Return the errors of a run whose third and fourth losses are NaN, and of one resumed after the third."""
    words, found = ("strategy=single", "+data.task.rank=0", "+data.task.times=2"), []
    resumed = ("data.task.call=1", f"resume={root / 'whole' / 'checkpoints' / 'step_00000003'}")
    for name, own in (("whole", ()), ("resumed", resumed)):
        with context_of(*FAILS, *words, *own, f"run_dir={root / name}") as context:
            with pytest.raises(NonFiniteError) as ended:
                fit(context)
            found.append(str(ended.value))
    return found


def test_too_many_consecutive_skips_end_the_run_also_across_a_resume(tmp_path: Path) -> None:
    for said in run_ranks(too_many, 1, tmp_path, init=False)[0]:
        assert said.startswith("the loss of step 4 is NaN or Inf on rank 0"), said


POISONED = (
    *("data.dataset._target_=tests.user_parts.NanAt", "+data.dataset.index=70"),
    *("model._target_=tests.user_parts.Normed", "~model.hidden", "~model.input_shape", "~model.num_classes"),
    *("data.task._target_=trainer.tasks.Classification", "~data.task.call", "~data.task.how"),
    *("train.global_batch_size=16", "optim.lr=0.01"),
)


def buffers(run_dir: Path, *overrides: str) -> tuple[int, bool]:
    found = fitted(run_dir, *POISONED, *overrides)
    return found["result"]["skipped_steps"], all(v.isfinite().all() for v in found["after"][-1].values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_skipped_step_does_not_change_running_statistics(strategy: str, tmp_path: Path) -> None:
    """A NaN sample occurs once per epoch of eight steps, and would stay in the running means."""
    world_size = 1 + (strategy != "single")
    words = (f"strategy={strategy}", "train.max_steps=8")
    assert run_ranks(buffers, world_size, tmp_path, *words, init=False) == [(1, True)] * world_size


def read_past(root: Path, *words: str) -> list[bool]:
    """Return whether runs that skip step 3, uninterrupted and resumed, equal a run without the third update."""
    words = (*words, SOUND, "+data.task.rank=0")
    with context_of(*FAILS, *words, f"run_dir={root / 'by_hand'}") as context:
        optimizer, state = context.state.optimizer, context.state
        step, count_update = optimizer.step, state.count_update

        def unless_third(*arguments: Any) -> None:
            if state.progress.step != 2:
                step(*arguments)

        optimizer.step = unless_third  # type: ignore[method-assign, assignment]
        state.count_update = lambda made: count_update(made and state.progress.step != 2)  # type: ignore[method-assign]
        fit(context)
        by_hand = everything(context)
    found = []
    for name, resume in ("straight", "null"), ("resumed", f"{root}/by_hand/checkpoints/step_00000002"):
        run = fitted(root / name, *words, f"resume={resume}", "train.skip_steps=[[3,3]]")
        assert (run["result"]["skipped_steps"], run["progress"].skipped_in_a_row) == (1, 0)
        found.append(same(run["after"][-1], by_hand))
    plain = fitted(root / "plain", *words)
    return [*found, same(plain["after"][-1], by_hand)]


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=single",),
        pytest.param(("strategy=ddp",), marks=pytest.mark.slow),
        pytest.param(("strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param(("strategy=ddp", "train.exact=4"), marks=pytest.mark.slow),
    ],
    ids=lambda words: "_".join(word.partition("=")[2] for word in words),
)
def test_skip_steps_consumes_samples_without_an_update(words: tuple[str, ...], tmp_path: Path) -> None:
    world_size = 1 + (words[0] != "strategy=single")
    found = run_ranks(read_past, world_size, tmp_path, *words, init=False)
    assert found == [[True, True, False]] * world_size
