"""Compare the peak memory of a GPU over some steps with the prediction of `python -m planner.memory`."""

import contextlib
import gc
import importlib.util
import io
import itertools
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.gpu.day import Day, Row, contexts, steps
from benchmarks.gpu.launched import train

GPT = ("experiment=text_gpt", "model.size=gpt2", "data.dataset.block_size=1024", "train.global_batch_size=8")
RUNS = {
    "gpt2 fp32": GPT,
    "gpt2 bf16": (*GPT, "train.precision=bf16"),
    "gpt2 bf16 checkpointing": (*GPT, "train.precision=bf16", "strategy.activation_checkpointing=true"),
    "gpt2 fsdp bf16": (*GPT, "strategy=fsdp", "train.precision=bf16"),
    "resnet50 bf16": (
        *(
            "data=fake",
            "data.dataset.input_shape=[3,224,224]",
            "data.dataset.num_samples=256",
            "model=resnet50",
        ),
        *("train.precision=bf16", "train.channels_last=true", "train.global_batch_size=64"),
    ),
}
SHORT = (
    "train.max_steps=3",
    "schedule.warmup_steps=0",
    "train.eval_every_epochs=0",
    "checkpoint.every_epochs=null",
)
TINY = {"gpt bf16": ("experiment=text_gpt", "train.global_batch_size=2", "train.precision=bf16")}


def measure(day: Day) -> Iterator[Row]:
    for name, overrides in day.size(RUNS, TINY).items():
        overrides = (*overrides, "train.max_steps=1000", "train.log_every_steps=1000")
        yield _compared(name, _measured(day, overrides), overrides)


def shards(day: Day) -> Iterator[Row]:
    """Compare the memory of one of two ranks that share a GPU."""
    ways = day.size({"gpt2 fsdp bf16": RUNS["gpt2 bf16"]}, {"gpt fsdp": TINY["gpt bf16"]})
    for name, overrides in ways.items():
        overrides = (*overrides, "strategy=fsdp", *SHORT)
        with tempfile.TemporaryDirectory() as folder:
            result = train(day, 2, "logger=jsonl", base=overrides, run_dir=Path(folder, "run"))
        measured = int(result["peak_memory_bytes"]) if day.on_gpu else None
        yield _compared(f"{name}, 2 ranks", measured, overrides, world=2)


def _compared(name: str, measured: int | None, overrides: tuple[str, ...], world: int = 1) -> Row:
    predicted, why = _predicted(overrides, world)
    if measured is None or predicted is None:
        known, note = (predicted, "predicted; no GPU to measure") if measured is None else (measured, why)
        return Row(f"peak of {name}", (known or 0) / 1e6, "MB", note=why or note)
    off = measured / predicted - 1
    note = f"{predicted / 1e6:.0f} MB predicted, {off:+.1%}"
    return Row(f"peak of {name}", measured / 1e6, "MB", "within 10 %", abs(off) <= 0.1, note)


def _measured(day: Day, overrides: tuple[str, ...]) -> int | None:
    if day.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with contexts() as context:
        for _ in itertools.islice(steps(context(*overrides)), 3):
            pass
    gc.collect()
    return torch.cuda.max_memory_allocated() - before if day.on_gpu else None


def _predicted(overrides: tuple[str, ...], world: int) -> tuple[int | None, str]:
    """Return the prediction of planner.memory in bytes, or the reason why there is none."""
    if importlib.util.find_spec("planner.memory") is None:
        return None, "planner.memory is not installed"
    strategy = () if any(each.startswith("strategy=") for each in overrides) else ("strategy=single",)
    command = ["planner.memory", *overrides, *strategy, "--json"]
    command += ["--world", str(world), "--per-host", str(world)]
    output = io.StringIO()
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(output):
        try:
            runpy.run_module("planner.memory", run_name="__main__")
        except SystemExit as end:
            if end.code:
                return None, f"planner.memory ended with {end.code}"
    found = json.loads(output.getvalue())
    row = next((value for value in found.values() if "peak" in value), None)
    return (None, f"planner.memory predicts no peak: {found}") if row is None else (int(row["peak"]), "")
