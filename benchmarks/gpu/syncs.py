"""Count unintended synchronisations with the GPU per step without logging, by source line."""

import collections
import itertools
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.day import Day, Row, contexts, steps
from benchmarks.gpu.resnet import OVERRIDES as RESNET

ROOT = Path(__file__).parents[2]
RUNS = {
    "gpt bf16": ("experiment=text_gpt", "train.precision=bf16", "train.global_batch_size=8"),
    "gpt fp16": ("experiment=text_gpt", "train.precision=fp16", "train.global_batch_size=8"),
    "gpt fsdp bf16": ("experiment=text_gpt", "strategy=fsdp", "train.precision=bf16"),
    "resnet bf16": RESNET,
}


def measure(day: Day) -> Iterator[Row]:
    count = day.size(10, 3)
    ways = day.size(RUNS, {"gpt bf16": RUNS["gpt bf16"]})
    with contexts() as context:
        for name, overrides in ways.items():
            way = steps(context(*overrides, "train.log_every_steps=100000", "train.max_steps=100000"))
            for _ in itertools.islice(way, day.size(10, 2)):
                pass
            with count_syncs(day) as seen:
                for _ in itertools.islice(way, count):
                    pass
            # On a CPU, only the counting is tested.
            lines = "; ".join(f"{line} x {times / count:g}" for line, times in seen.most_common(8))
            per_step = sum(seen.values()) / count
            ok = per_step <= 1 if day.on_gpu else None
            yield Row(f"unintended synchronisations per step, {name}", per_step, "", "<= 1", ok, lines)


@contextmanager
def count_syncs(day: Day) -> Iterator[collections.Counter[str]]:
    """Count torch's warnings by source line; on a CPU, calls of `item()`, which would synchronise."""
    seen: collections.Counter[str] = collections.Counter()

    def note() -> None:
        lines = [
            f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
            for frame in traceback.extract_stack(sys._getframe(2))
            if frame.filename.startswith(str(ROOT)) and "benchmarks" not in frame.filename
        ]
        seen[" < ".join(lines[:-3:-1]) or "torch"] += 1

    class Items(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten._local_scalar_dense:
                note()
            return func(*args, **(kwargs or {}))

    def show(message: Warning | str, *rest: Any) -> None:
        if "synchronizing" in str(message):
            note()

    if not day.on_gpu:
        with Items():
            yield seen
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        yield seen
        torch.cuda.set_sync_debug_mode("default")
