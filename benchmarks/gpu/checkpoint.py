"""Measure how long training waits for a save of GPT-2 and AdamW from a GPU, and the time of a load."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks.gpu.day import Day, Row, contexts, steps


def measure(day: Day) -> Iterator[Row]:
    from trainer.loop import save

    model = day.size("gpt2", "gpt-micro")
    common = (
        *("experiment=text_gpt", f"model.size={model}", "train.global_batch_size=2", "train.max_steps=1000"),
        *("train.precision=bf16", "train.log_every_steps=1000"),
    )
    kinds = [("full", False), ("full", True), ("sharded", False), ("sharded", True)]
    for kind, in_background in day.size(kinds, kinds[::3]):
        name = f"save {model}, {kind}{' async' * in_background}"
        with tempfile.TemporaryDirectory() as run_dir, contexts() as context:
            options = (*common, f"checkpoint={kind}", f"checkpoint.async={str(in_background).lower()}")
            options += (f"run_dir={run_dir}",)
            made = context(*options)
            way = steps(made)
            waited: list[float] = []
            for _ in range(day.size(3, 1)):  # the first also allocates pinned memory
                for _ in itertools.islice(way, 2):
                    pass
                day.finish()
                called = _seconds(lambda made=made: save(made))
                copied = _seconds(made.checkpointer.saving.wait_until_copied)
                waited.append(called + copied)
                written = _seconds(made.checkpointer.saving.wait)
            note = f"first save {waited[0]:.2f} s; another {written:.2f} s in the background" * in_background
            yield Row(name, min(waited), "s of waiting", note=note)
            loaded = _seconds(lambda context=context, options=options: context(*options, "resume=auto"))
            yield Row(f"build and load {model}, {kind}", loaded, "s")


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
