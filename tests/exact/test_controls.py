"""Errors, warnings and checks of train.exact."""

import dataclasses
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import runs
from tests.exact.matrix import COMMON, MODELS, OPTIMIZERS, refused_each
from tests.ranks import run_ranks
from trainer import step
from trainer.data.loading.batch import split_chunks
from trainer.errors import NonFiniteError, UserError
from trainer.exact.environment import exact_facts
from trainer.loop import fit
from trainer.report import run_hash
from trainer.strategies import build

MLP = (*MODELS["mlp"], *OPTIMIZERS["sgd"])


@pytest.mark.parametrize(
    "words",
    [
        "strategy=parameter_server",
        "strategy=ddp comm=ring comm.wire_dtype=bf16",
        "strategy=fsdp strategy.shard_group=2",
        "train.precision=fp16",
    ],
)
def test_settings_that_cannot_be_exact_are_refused_in_one_line(words: str) -> None:
    with pytest.raises(
        UserError, match=r"^train.exact=8 is not supported with \S+, [^\n]*(use|take|set) [^\n]*$"
    ):
        runs.settings("train.exact=8", *words.split())


def test_batches_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(
        UserError, match=r"nearest values that work are train.exact=8, or train.global_batch_size=63"
    ):
        split_chunks(64, None, 7, 1, range(7))
    with pytest.raises(
        UserError, match=r"train.micro_batch_size=4, but .* set train.micro_batch_size=8, or null"
    ):
        split_chunks(64, 4, 8, 1, range(8))


@pytest.mark.slow
def test_ranks_and_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    adagrad = ("optim._target_=torch.optim.Adagrad", "~optim.momentum")
    expected = {
        ("strategy=fsdp",): "is not divisible by the 3 ranks",
        ("strategy=ddp", "train.exact=2"): "fewer chunks than the 3 ranks; set train.exact=3",
        ("strategy=ddp", "+optim.fused=true"): "train.exact is not supported with optim.fused=true on a CPU",
        (
            "strategy=fsdp",
            "train.exact=6",
            *adagrad,
        ): "train.exact is not supported with Adagrad and strategy=fsdp",
    }
    each = [(*MLP, f"run_dir={tmp_path}", *overrides) for overrides in expected]
    messages = run_ranks(refused_each, 3, *each, init=False)[0]
    assert all(words in one for one, words in zip(messages, expected.values(), strict=True)), messages


def _with_other_threads(*overrides: str) -> str:
    seeded = step.seed_micro_batch

    def seed_micro_batch(seed: int, step_: int, *rest: Any) -> None:
        torch.set_num_threads(1 + (step_ == 3))
        seeded(seed, step_, *rest)

    step.seed_micro_batch = seed_micro_batch
    return refused_each(overrides)[0]


def test_threads_changed_after_the_start_are_named(tmp_path: Path) -> None:
    words = run_ranks(_with_other_threads, 1, *MLP, f"run_dir={tmp_path}", init=False)[0]
    assert "rank 0" in words and "uses 2 threads instead of 1" in words


def _in_another_environment(*overrides: str) -> str:
    environment = build.environment
    if os.environ["RANK"] == "1":
        build.environment = lambda device: environment(device) | {"the CPU": "an abacus"}
    return refused_each(overrides)[0]


def test_a_rank_in_another_environment_is_refused_at_the_start_and_named(tmp_path: Path) -> None:
    for words in run_ranks(_in_another_environment, 2, *MLP, f"run_dir={tmp_path}", init=False):
        assert "rank 1" in words and "differs from rank 0 in the CPU: 'an abacus' instead of" in words


class _Scaled:
    """A task whose third loss on rank 1, after the four losses of the dry run, is multiplied by a factor."""

    def __init__(self, task: Any, factor: float) -> None:
        self._task, self._factor, self._calls = task, factor, 0

    def loss(self, model: Any, batch: Any) -> Any:
        self._calls += 1
        loss = self._task.loss(model, batch)
        return loss * self._factor if self._calls == 7 and dist.get_rank() == 1 else loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def _not_applied(factors: tuple[float, ...], *overrides: str) -> list[tuple[str, bool]]:
    """Return how the run ends with each factor, and whether its parameters are unchanged."""
    ends = []
    for factor in factors:
        with runs.context_of(*COMMON, *overrides) as context:
            before = run_hash.parameters_sha256(context.state.model)
            with pytest.raises(NonFiniteError) as error:
                fit(dataclasses.replace(context, task=_Scaled(context.task, factor)))
            ends.append((str(error.value), run_hash.parameters_sha256(context.state.model) == before))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "clip"), [("ddp", "null"), ("fsdp", "0.5")])
def test_a_gradient_beyond_the_range_ends_the_run_before_its_step(
    tmp_path: Path, strategy: str, clip: str
) -> None:
    options = (f"strategy={strategy}", f"run_dir={tmp_path}", f"train.clip_grad_norm={clip}")
    for ends in run_ranks(_not_applied, 2, (1e7, math.nan, math.inf), *MLP, *options, init=False):
        for words, (messages, is_unchanged) in zip(
            ("or beyond +-512", "is NaN or Inf", "is NaN or Inf"), ends, strict=True
        ):
            assert words in messages and is_unchanged


def test_a_changed_environment_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    here: Any = SimpleNamespace(device=torch.device("cpu"), is_main=True)
    saved = exact_facts(8, here, None, 0)
    assert (
        saved is not None
        and saved["leaves"] == 8
        and saved["since"] == 0
        and saved["ground"]["torch"] == torch.__version__
    )
    with caplog.at_level(logging.WARNING):
        assert exact_facts(8, here, saved, 7) == saved
        assert not caplog.records
        moved = saved | {"ground": saved["ground"] | {"the CPU": "an abacus"}}
        elsewhere, wider = exact_facts(8, here, moved, 7), exact_facts(4, here, saved, 9)
    assert elsewhere is not None and elsewhere["since"] == 7
    assert wider is not None and wider["since"] == 9
    assert exact_facts(None, here, saved, 9) is None
    assert ["the CPU was an abacus, and is " in record.getMessage() for record in caplog.records] == [
        True,
        False,
    ]
    assert "train.exact was 8, and is now 4" in caplog.records[1].getMessage()


STREAM = ("data.dataset._target_=tests.data.streams.Stateful", "+data.dataset.num_samples=77")


def _resumed(root: Path, data: tuple[str, ...], strategy: str, stop: int, resume: str) -> Any:
    words = (*COMMON, *MODELS["norm"], *OPTIMIZERS["adamw"], f"strategy={strategy}", "train.max_steps=8")
    return runs.train(
        *(*words, f"run_dir={root / str(stop)}", "checkpoint.every_steps=2", "checkpoint.keep_last=9"),
        *("ema.decay=0.9", f"resume={resume}", *data),
    )


@pytest.mark.slow
def test_changing_ranks_and_strategies_gives_the_same_hash(tmp_path: Path) -> None:
    data = (*STREAM, "data.sharded=true", "data.num_workers=2")
    whole = run_ranks(_resumed, 1, tmp_path, data, "single", 0, "null", init=False)[0]
    places = {2: (2, "fsdp"), 4: (3, "ddp"), 6: (2, "fsdp")}
    before = 0
    for stop, (world, strategy) in places.items():
        resume = str(tmp_path / str(before) / "checkpoints" / f"step_{stop:08d}")
        result = run_ranks(_resumed, world, tmp_path, data, strategy, stop, resume, init=False)[0]
        assert result["param_sha256"] == whole["param_sha256"]
        assert result["eval/ema/loss"] == whole["eval/ema/loss"]
        assert result["exact"] == whole["exact"] and whole["exact"]["since"] == 0
        before = stop
