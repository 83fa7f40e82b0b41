"""The parts of the GPU benchmarks, the most valuable first, and the choice by a time budget."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.day import Day, Row


@dataclass(frozen=True)
class Part:
    """A benchmark: estimated `seconds` on an H100, and `function` as MODULE.FUNCTION in benchmarks.gpu."""

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
    Part(
        "allreduce",
        60,
        "sums are right, with ranks sharing a GPU by NCCL's flag and by host IDs",
        "shared.allreduce",
    ),
    Part("one_hash", 150, "train.exact: one hash over NCCL, on 1, 2 and 4 ranks", "shared.one_hash"),
    Part("ranks", 200, "two ranks: the same loss with nine strategies and all-reduces", "shared.ranks"),
    Part("drill", 240, "kill, exception, hang, NaN: rank reported, restarted run equal", "failures.drill"),
    Part("all_reduce", 60, "failures in an all-reduce: run ends in time, step saved", "failures.all_reduce"),
    Part("recorder", 30, "a hang: files of the flight recorder and an answer of RAS", "failures.recorder"),
    Part(
        "schedules",
        120,
        "four ranks: the same loss with five all-reduces and hybrid shards",
        "shared.schedules",
    ),
    Part("moves", 90, "train.exact: one hash after resumes with ddp, fsdp and single", "shared.moves"),
    Part("races", 90, "TORCH_CUDA_SANITIZER reports nothing under ddp, ring and fsdp", "shared.races"),
    Part("sockets", 60, "train.exact: the same hash by host IDs and sockets", "shared.sockets"),
    # Needs a whole call of ten minutes
    Part("gpt2", 540, "GPT-2 124M: at least nanoGPT's tokens/s", "gpt2"),
    Part("shards", 40, "two ranks under fsdp: peak within 10 % of planner.memory", "memory.shards"),
    Part("verify", 120, "train.verify_every: a flipped bit found, cost at most 2 %", "shared.verify"),
    # One process
    Part("challenge", 150, "train.exact: one hash after random kills, with NCCL", "shared.challenged"),
    Part("tests", 120, "all tests marked cuda pass", "tests"),
    Part("matrix", 90, "strategies, precisions, checkpoints: resumed runs have the same bits", "matrix"),
    Part("exact", 120, "train.exact: one hash, at most 1.15 times the time", "exact"),
    Part("syncs", 60, "at most one unintended synchronisation per step", "syncs"),
    Part("memory", 90, "peaks within 10 % of planner.memory", "memory"),
    Part("checkpoint", 60, "time that a save delays training, time of a load", "checkpoint"),
    Part("packed", 45, "FlashAttention: at least as fast as a mask", "packed"),
    Part("resnet", 300, "ResNet-50: at least 0.97 of a plain loop's images/s", "resnet"),
    Part("compiled", 300, "the matrix with train.compile=true", "compiled"),
    Part("sanitized", 150, "tests marked cuda: TORCH_CUDA_SANITIZER reports nothing", "tests.sanitized"),
)


def chosen(parts: Iterable[Part], budget_s: float) -> list[Part]:
    """Return, in order, each part that fits into the time left by the parts before it."""
    found = []
    for part in parts:
        if part.seconds <= budget_s:
            found.append(part)
            budget_s -= part.seconds
    return found


def listing(parts: Sequence[Part]) -> str:
    lines = [f"{part.name:<12}{part.seconds:>5} s  {part.bar}" for part in parts]
    return "\n".join([*lines, f"{'total':<12}{sum(part.seconds for part in parts):>5} s, {len(parts)} parts"])
