"""Runs on streams, stopped at random and resumed at other world sizes, lose or repeat no sample."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.checkpoint.whole_runs import DDP, FSDP, LAST_STEP, SINGLE, differences, run
from tests.data.streams import numbers_of
from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from trainer.distributed.process_group import process_group

NUM_SAMPLES = 38  # 3 steps of 12 to an epoch, 2 remain


def on(stream: str) -> tuple[str, ...]:
    return (f"data.dataset._target_=tests.data.streams.{stream}", f"+data.dataset.num_samples={NUM_SAMPLES}")


def _resumed(root: Path, worlds: list[tuple[str, tuple[str, ...]]]) -> dict[str, list[str]]:
    """Return the differences between runs resumed at a random step and uninterrupted runs."""
    torch.set_num_threads(1)
    drawn, found = random.Random(str(worlds)), {}
    with process_group(runs.settings(*worlds[0][1]).distributed) as ranks:
        for name, overrides in worlds:
            stop = drawn.randrange(1, LAST_STEP)  # of each stream its own
            original = run(ranks, root / name, *overrides, save_at=[stop])
            checkpoint = root / name / "checkpoints" / f"step_{stop:08d}"
            resumed = run(ranks, root / f"{name}-on", *overrides, resume=str(checkpoint), save_at=())
            expected = original["samples"][len(original["samples"]) // LAST_STEP * stop :]
            different = differences(original["end"], resumed["end"])
            different += [] if resumed["samples"][-len(expected) :] == expected else ["samples"]
            found[f"{name} at {stop}"] = different
    return {stop: different for stop, different in found.items() if different}


SEVERAL, WORKERS = "train.micro_batch_size=3", "data.num_workers=2"
KINDS = {
    "stateful": (*on("Stateful"), SEVERAL),
    "without-state-workers": (*on("Numbers"), SEVERAL, WORKERS),
    "sharded-workers": (*on("Stateful"), "data.sharded=true", WORKERS),
}


@pytest.mark.parametrize(
    ("world", "strategy", "kinds"),
    [(1, SINGLE, tuple(KINDS)[1:2]), (2, DDP, tuple(KINDS)[2:]), (2, FSDP, tuple(KINDS)[:1])],
    ids=["single", "ddp-2", "fsdp-2"],
)
@pytest.mark.slow
def test_a_resumed_run_on_a_stream_equals_an_uninterrupted_one(
    tmp_path: Path, world: int, strategy: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    worlds = [(kind, (*strategy, *KINDS[kind])) for kind in kinds]
    assert run_ranks(_resumed, world, tmp_path, worlds, init=False) == [{}] * world


@pytest.mark.slow
def test_a_stream_continues_on_one_then_two_then_four_ranks(tmp_path: Path) -> None:
    kinds = [on("Numbers"), (*on("Stateful"), "data.sharded=true")]
    for read in _numbers_read(tmp_path, kinds):
        assert read == [*range(36), *range(24)]  # the second epoch begins with step 4


@pytest.mark.slow
def test_hugging_face_streams_continue_at_other_world_sizes(tmp_path: Path) -> None:
    """A user's own files, configured only by settings."""
    pytest.importorskip("datasets")
    row = [0.0] * 10
    for file in range(2):
        rows = [{"row": [n / 64, *row[1:]], "label": n % 4} for n in range(file * 19, file * 19 + 19)]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held-out.json").write_text("\n".join([json.dumps({"row": row, "label": 0})] * 5))
    data = (
        "data=hugging_face",
        "data.dataset.path=json",
        f"data.dataset.data_files={{train: {tmp_path}/*.jsonl, eval: {tmp_path}/held-out.json}}",
        "data.dataset.columns=[row, label]",
        "model.num_classes=4",
    )
    settings = tuple(text for text in SINGLE if text.startswith("data."))
    [read] = _numbers_read(tmp_path / "run", [data], without=settings)
    assert read[:36] == list(range(36))
    assert sorted(set(read[36:])) == sorted(read[36:])  # their second epoch takes the files in another order


def _numbers_read(root: Path, kinds: list[tuple[str, ...]], without: tuple[str, ...] = ()) -> list[list[int]]:
    """Return the ids read, in order, by a run on one rank that continues on two and then four."""
    read: list[list[int]] = [[] for _ in kinds]
    for world, strategy, last_step in ((1, SINGLE, 2), (2, DDP, 4), (4, FSDP, 5)):
        settings = tuple(setting for setting in strategy if setting not in without)
        ranks = run_ranks(
            _of_each, world, root, last_step, [(*settings, *data) for data in kinds], init=False
        )
        for of_kind, seen in zip(zip(*ranks, strict=True), read, strict=True):
            for of_step in zip(*of_kind, strict=True):
                seen += [number for column in zip(*of_step, strict=True) for number in column]
    return read


def _of_each(root: Path, last_step: int, kinds: list[tuple[str, ...]]) -> list[list[list[int]]]:
    torch.set_num_threads(1)
    with process_group(runs.settings(*kinds[0]).distributed) as ranks:
        found = []
        for number, kind in enumerate(kinds):
            words = (*kind, f"train.max_steps={last_step}")
            again = run(ranks, root / str(number), *words, resume="auto", save_at=(), named=numbers_of)
            found.append(again["samples"])
        return found


@pytest.mark.slow
def test_a_stream_of_unknown_length_needs_a_last_step_and_a_batch(tmp_path: Path) -> None:
    words = [(*SINGLE, *on("Numbers"), f"run_dir={tmp_path / str(n)}") for n in (0, 1)]
    endless, short = (*words[0], "train.max_steps=null"), (*words[1], "train.global_batch_size=64")
    ((first, second),) = run_ranks(refusals, 1, endless, short, init=False)
    assert "train.max_steps is null, but the training data is a stream of unknown length" in first
    assert "epoch 0 has less training data than one global batch of 64 samples" in second


def _ended(run_dir: Path) -> dict[str, Any]:
    """Train on a stream that ends after two epochs, before max_steps, with saves at the ends of epochs."""
    return runs.train(
        *SINGLE,
        *on("Numbers"),
        f"run_dir={run_dir}",
        "train.max_steps=1000",
        "train.epochs=2",
        "train.eval_every_epochs=0",
        "train.eval_every_steps=4",
        "train.log_every_steps=1",
        "checkpoint.every_steps=null",
        "checkpoint.every_epochs=1",
    )


def test_epochs_end_with_the_stream(tmp_path: Path) -> None:
    (result,) = run_ranks(_ended, 1, tmp_path, init=False)
    assert (result["steps"], result["epochs"], result["samples_seen"]) == (6, 2.0, 72)
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step_*"))] == [
        "step_00000003",
        "step_00000006",
    ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in lines if "eval/loss" in line] == [
        f'{{"step": {step}' for step in (4, 6)
    ]
