"""Count unintended waits for the GPU in a step without logging, by line."""

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
from benchmarks.gpu.resnet import OURS as RESNET

ROOT = Path(__file__).parents[2]
WAYS = {
    "gpt bf16": ("experiment=text_gpt", "train.precision=bf16", "train.global_batch_size=8"),
    "gpt fp16": ("experiment=text_gpt", "train.precision=fp16", "train.global_batch_size=8"),
    "gpt fsdp bf16": ("experiment=text_gpt", "strategy=fsdp", "train.precision=bf16"),
    "resnet bf16": RESNET,
}


def measure(day: Day) -> Iterator[Row]:
    count = day.size(10, 3)
    ways = day.size(WAYS, {"gpt bf16": WAYS["gpt bf16"]})
    with contexts() as context:
        for name, overrides in ways.items():
            way = steps(context(*overrides, "train.log_every_steps=100000", "train.max_steps=100000"))
            for _ in itertools.islice(way, day.size(10, 2)):
                pass
            with waits(day) as seen:
                for _ in itertools.islice(way, count):
                    pass
            # A CPU has no queue to run dry; there only the counting is tested.
            lines = "; ".join(f"{line} x {times / count:g}" for line, times in seen.most_common(8))
            a_step = sum(seen.values()) / count
            ok = a_step <= 1 if day.on_gpu else None
            yield Row(f"hidden waits a step, {name}", a_step, "", "<= 1", ok, lines)


@contextmanager
def waits(day: Day) -> Iterator[collections.Counter[str]]:
    """Counts torch's warnings by line of this project; on a CPU, calls that would wait on a GPU: `item()`."""
    seen: collections.Counter[str] = collections.Counter()

    def note() -> None:
        ours = [
            f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
            for frame in traceback.extract_stack(sys._getframe(2))
            if frame.filename.startswith(str(ROOT)) and "benchmarks" not in frame.filename
        ]
        seen[" < ".join(ours[:-3:-1]) or "torch"] += 1

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
