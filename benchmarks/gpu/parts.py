"""The parts of a GPU hour, the most valuable first, and the choice of those that fit into a budget."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.day import Day, Row


@dataclass(frozen=True)
class Part:
    """`seconds`: an estimate for one H100. `function`: MODULE.FUNCTION in benchmarks.gpu."""

    name: str
    seconds: int
    bar: str
    function: str

    def measure(self, day: Day) -> Iterator[Row]:
        module, _, function = self.function.partition(".")
        measure: Callable[[Day], Iterable[Row]] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), function or "measure"
        )
        yield from measure(day)


PARTS = (
    # NCCL between ranks that share the GPU
    Part("allreduce", 60, "right sums, by NCCL's flag and by host IDs", "shared.allreduce"),
    Part("one_hash", 150, "train.exact: one hash over NCCL, on 1, 2 and 4 ranks", "shared.one_hash"),
    Part("ranks", 200, "two ranks: nine ways to the same loss", "shared.ranks"),
    Part("drill", 240, "killed, raised, hung, NaN: the rank named, the restart equal", "failures.drill"),
    Part("all_reduce", 60, "failures in an all-reduce: ended in time, the step saved", "failures.all_reduce"),
    Part("recorder", 30, "flight recorder and RAS: both ranks' files", "failures.recorder"),
    Part("schedules", 120, "four ranks: five schedules and hybrid shards, native's loss", "shared.schedules"),
    Part("moves", 90, "train.exact: one hash, resumed from ddp to fsdp to single", "shared.moves"),
    Part("races", 90, "TORCH_CUDA_SANITIZER reports nothing under ddp, ring and fsdp", "shared.races"),
    Part("sockets", 60, "train.exact: the same hash by host IDs and sockets", "shared.sockets"),
    # Alone in a call of ten minutes
    Part("gpt2", 540, "GPT-2 124M: 1.0 of nanoGPT's tokens/s or more", "gpt2"),
    Part("shards", 40, "two ranks under fsdp: peak within 10 % of planner.memory", "memory.shards"),
    Part("verify", 120, "train.verify_every: a flipped bit found; 2 % or less", "shared.verify"),
    # One process
    Part("challenge", 150, "train.exact: killed at random over NCCL, one hash", "shared.challenged"),
    Part("tests", 120, "all tests marked cuda pass", "tests"),
    Part("matrix", 90, "strategies, precisions, checkpoints: same bits resumed", "matrix"),
    Part("exact", 120, "train.exact: one hash, 1.15 of the time or less", "exact"),
    Part("syncs", 60, "one unintended wait per step or less", "syncs"),
    Part("memory", 90, "peaks within 10 % of planner.memory", "memory"),
    Part("checkpoint", 60, "delay of a save, time of a load", "checkpoint"),
    Part("packed", 45, "FlashAttention: 1.0 of the mask's speed or more", "packed"),
    Part("resnet", 300, "ResNet-50: 0.97 of a bare loop or more", "resnet"),
    Part("compiled", 300, "the matrix with train.compile=true", "compiled"),
    Part("sanitized", 150, "tests marked cuda: TORCH_CUDA_SANITIZER reports nothing", "tests.sanitized"),
)


def chosen(parts: Iterable[Part], budget_s: float) -> list[Part]:
    """Return, in order, each part whose estimate fits into what the parts before it have left."""
    found = []
    for part in parts:
        if part.seconds <= budget_s:
            found.append(part)
            budget_s -= part.seconds
    return found


def listing(parts: Sequence[Part]) -> str:
    lines = [f"{part.name:<12}{part.seconds:>5} s  {part.bar}" for part in parts]
    return "\n".join([*lines, f"{'total':<12}{sum(part.seconds for part in parts):>5} s, {len(parts)} parts"])
