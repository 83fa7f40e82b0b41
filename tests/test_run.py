"""Results of a run: directory, metrics and TensorBoard page; and runs with users' own classes."""

import gc
import json
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planner import step
from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.errors import UserError
from trainer.loop import fit
from trainer.start_table import layout

METRICS = {"strategy", "comm", "world_size", "steps", "epochs", "samples_seen", "train/loss", "eval/loss"}
METRICS |= {"eval/accuracy", "samples_per_second", "ms_per_step", "peak_memory_bytes", "param_sha256"}
NOT_KEPT = ("train/loss", "samples_per_second", "ms_per_step", "peak_memory_bytes")
QUICK = ("train.epochs=2", "train.log_every_steps=5", "model.hidden=[32]")
SHORT = ("train.max_steps=6", "train.eval_every_epochs=0")


def quick(run_dir: Path, *overrides: str) -> dict[str, Any]:
    return train(*QUICK, f"run_dir={run_dir}", *overrides)


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "single"), (2, "ddp")])
def test_run_directory(world_size: int, strategy: str, tmp_path: Path) -> None:
    quickly = run_ranks(quick, world_size, tmp_path, f"strategy={strategy}", init=False)[0]
    result = json.loads((tmp_path / "result.json").read_text())
    assert quickly == result
    assert result.keys() >= METRICS
    comm = "tree" if strategy == "ddp" else "native"  # comm=auto, on one host
    assert (result["strategy"], result["world_size"], result["comm"]) == (strategy, world_size, comm)
    assert (result["steps"], result["epochs"], result["samples_seen"]) == (44, 2.0, 44 * 64)
    assert result["eval/accuracy"] > 0.5, "ten classes: chance is 0.1"
    assert result["samples_per_second"] == pytest.approx(64e3 / result["ms_per_step"])
    if strategy == "ddp":  # for the plans of other worlds
        assert sum(bucket.numel for bucket in step.read(tmp_path).buckets) == 64 * 32 + 32 + 32 * 10 + 10
    assert f"name: {strategy}" in (tmp_path / "config.yaml").read_text()
    assert (tmp_path / "train.log").stat().st_size > 0

    events = list(tmp_path.glob("events.*"))
    assert len(events) == 1, "one writer"
    page = EventAccumulator(str(tmp_path)).Reload()
    tags = set(page.Tags()["scalars"])
    assert tags >= {"train/loss", "eval/loss", "eval/accuracy", "train/lr", "train/grad_norm"}
    assert tags >= {
        "usage/samples_per_second",
        *(f"usage/ms_per_step/{p}" for p in ("step", "data", "compute", "rest")),
    }
    assert [event.step for event in page.Scalars("train/loss")] == list(range(5, 45, 5))
    assert "config/text_summary" in page.Tags()["tensors"]

    if strategy == "single":  # killed between its last checkpoint and its result
        (tmp_path / "result.json").unlink()
        again = quick(tmp_path, "resume=auto", "strategy=single")
        assert json.loads((tmp_path / "result.json").read_text()) == again
        assert again["ms_per_step"] is None, "no step was made"
        assert {**again, **{name: result[name] for name in NOT_KEPT}} == result


@pytest.mark.slow
def test_a_seed_is_drawn_once_for_all_ranks(tmp_path: Path) -> None:
    ours, theirs = (
        run_ranks(quick, 2, tmp_path / name, "seed=null", *SHORT, init=False)[0]["param_sha256"]
        for name in ("one", "other")
    )
    assert ours != theirs


OWN_PARTS = (
    *("data.dataset._target_=tests.user_parts.Stripes", "+data.dataset.num_samples=256", "train.epochs=10"),
    *("model._target_=tests.user_parts.Tiny", "~model.input_shape", "~model.num_classes", "~model.hidden"),
    *("+model.width=16", "optim._target_=torch.optim.RMSprop", "optim.lr=0.01"),
    *("schedule._target_=torch.optim.lr_scheduler.StepLR", "~schedule.warmup_steps", "~schedule.total_steps"),
    *("~schedule.final_fraction", "+schedule.step_size=50"),
)


def own_parts(run_dir: Path) -> dict[str, Any]:
    return train(*OWN_PARTS, f"run_dir={run_dir}")


@pytest.mark.slow
def test_users_own_classes_are_used_by_settings_only(tmp_path: Path) -> None:
    result = run_ranks(own_parts, 2, tmp_path, init=False)[0]
    assert result["eval/accuracy"] > 0.8, "two classes: chance is 0.5"


def last_lr_and_steps(run_dir: Path, *overrides: str) -> tuple[float, int]:
    with context_of(f"run_dir={run_dir}", *QUICK, *overrides, "checkpoint.every_epochs=null") as context:
        fit(context)
        return context.state.schedule.get_last_lr()[0], context.state.progress.step  # type: ignore[attr-defined]


def test_max_steps_ends_the_run_and_its_schedule(tmp_path: Path) -> None:
    options = ("schedule=cosine", "schedule.final_fraction=0.5", "schedule.warmup_steps=4", *SHORT)
    last, steps = run_ranks(last_lr_and_steps, 1, tmp_path, *options, init=False)[0]
    assert steps == 6
    assert last == pytest.approx(0.05, rel=1e-9), "half of optim.lr"


def eager_and_compiled(run_dir: Path, strategy: str) -> list[tuple[float, int]]:
    """Return the loss and the number of compiled graphs, without and with train.compile."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile = partial(torch.compile, backend=backend)
    found = []
    for on in (False, True):
        options = (*SHORT, f"strategy={strategy}", f"train.compile={on}")
        found.append((quick(run_dir / str(on), *options)["train/loss"], len(graphs)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_training_equals_eager_training(strategy: str, tmp_path: Path) -> None:
    for eager, compiled in run_ranks(eager_and_compiled, 2, tmp_path, strategy, init=False):
        assert (eager[1] == 0) and compiled[1] > 0
        assert compiled[0] == pytest.approx(eager[0], rel=1e-3)


@pytest.mark.slow
def test_inductor_training_equals_eager_training(tmp_path: Path) -> None:
    code = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    compiled, eager = (
        run_ranks(
            quick, 1, tmp_path / on, *SHORT, "strategy=single", f"train.compile={on}", env=code, init=False
        )[0]
        for on in ("true", "false")
    )
    assert list((tmp_path / "code").iterdir()), "it has compiled nothing"
    assert compiled["train/loss"] == pytest.approx(eager["train/loss"], rel=1e-3)


BARE = ["~model.hidden", "~model.input_shape", "~model.num_classes"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*BARE, "model._target_=torch.nn.Identity"], "Identity has nothing to train: none of its 0 par"),
        (
            [*BARE, "model._target_=torch.nn.LazyLinear", "+model.out_features=10"],
            "has uninitialized parameters: weight, bias",
        ),
        (
            [*BARE, "model._target_=tests.user_parts.Unsaveable", "+model.sparse=true"],
            r"has table, which is sparse \(sparse_coo\)",
        ),
        (
            ["optim._target_=torch.optim.Rprop"],
            "unexpected keyword argument .*; ~optim.momentum removes it",
        ),
        (
            ["data.task={_target_:builtins.dict}", "~data.task.label_smoothing"],
            r"returned a dict without loss and eval_sums and summarise \(or rows and summarise_rows\)",
        ),
    ],
)
def test_built_objects_must_have_the_right_type(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=f"^.*{words}"), context_of(f"run_dir={tmp_path}", *overrides):
        pass


def _workers_after(run_dir: Path) -> int:
    gc.disable()
    train("run_dir=" + str(run_dir), "strategy=single", "train.max_steps=1", "data.num_workers=1")
    return len(active_children())


@pytest.mark.slow
def test_data_workers_end_with_the_run_without_garbage_collection(tmp_path: Path) -> None:
    """A garbage collection would take 5 s per worker."""
    assert run_ranks(_workers_after, 1, tmp_path, init=False, fresh=True) == [0]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [([0], "1 on 1 host"), ([0, 1, 0, 1], "4 on 2 hosts"), ([0, 0, 1], "3 on 2 hosts (2 + 1)")],
)
def test_the_start_table_counts_the_ranks_of_every_host(hosts: list[int], words: str) -> None:
    assert layout(hosts) == words
