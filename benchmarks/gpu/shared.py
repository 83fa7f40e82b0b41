"""NCCL between ranks that share a GPU: sums, losses, hashes and races."""

import dataclasses
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.day import Day, Row
from benchmarks.gpu.launched import CommandError, python, torchrun, train
from tests.failure_parts import inject

SCHEDULES = ("ring", "tree", "halving_doubling", "hierarchical", "master_worker")
TWO_RANKS = (
    "ddp comm=native",
    *(f"ddp comm={name}" for name in SCHEDULES),
    "fsdp comm=native",
    "fsdp strategy.shard_group=1",
    "parameter_server",
)
FOUR_RANKS = ("ddp comm=native", *(f"ddp comm={name}" for name in SCHEDULES), "fsdp strategy.shard_group=2")
# The other schedules depend on train.max_steps, which a resumed run changes.
EXACT = ("train.exact=8", "schedule=constant", "~schedule.final_fraction")


def allreduce(day: Day) -> Iterator[Row]:
    """Check the sums of all all-reduces with NCCL's flag; of some with host IDs, bf16 and segments."""
    rounds = ("--rounds", day.size("5", "1"), "--share-gpu")
    variants: Sequence[tuple[str, Sequence[str], bool]] = (
        ("by the flag", day.size(["--sizes", "4K,4M,25M"], ["--sizes", "4K"]), False),
        ("by host IDs", ["--sizes", day.size("4K,4M", "4K"), "--algorithms", "native,ring"], True),
        ("bf16 sent", ["--sizes", "4K", "--wire-dtype", "bf16", "--algorithms", "ring,tree"], False),
        ("segments", ["--sizes", day.size("4M", "4K"), "--segment-mb", "2", "--algorithms", "ring"], False),
    )
    for name, options, by_host in day.size(variants, variants[:2]):
        file = day.out / f"allreduce-{name.replace(' ', '_')}.json"
        file.unlink(missing_ok=True)
        script = ["benchmarks/allreduce.py"]
        try:
            torchrun(day, 2, [*script, *rounds, *options, "--json", str(file)], by_host)
        except CommandError as error:
            yield Row(f"two ranks, {name}", None, bar="right", ok=False, note=str(error))
            continue
        for row in json.loads(file.read_text())["rows"]:
            what = f"two ranks, {name}, {row['algorithm']}, {row['size']:,} bytes"
            yield Row(what, row["seconds"] * 1e3, "ms", "right", row["wrong"] == 0)


def ranks(day: Day) -> Iterator[Row]:
    return _losses(day, 2, day.size(TWO_RANKS, TWO_RANKS[:2]))


def schedules(day: Day) -> Iterator[Row]:
    return _losses(day, 4, day.size(FOUR_RANKS, FOUR_RANKS[-1:]))


def _losses(day: Day, num_ranks: int, ways: Sequence[str]) -> Iterator[Row]:
    """Train with each strategy and all-reduce; all must have the same loss."""
    first = None
    for way in ways:
        what = f"{num_ranks} ranks, {way}"
        with tempfile.TemporaryDirectory() as folder:
            words = (*f"strategy={way}".split(), f"train.max_steps={day.size(20, 2)}")
            try:
                result = train(day, num_ranks, *words, run_dir=Path(folder, "run"))
            except CommandError as error:
                yield Row(what, None, bar="same loss", ok=False, note=str(error))
                continue
        loss = result["train/loss"]
        first = loss if first is None else first
        near = abs(loss - first) <= 1e-3 * first
        yield Row(what, result["ms_per_step"], "ms/step", "same loss", near, f"loss {loss:.5f}")


def one_hash(day: Day) -> Iterator[Row]:
    ways: dict[str, Callable[[Path], str]] = {"single": lambda path: _hash(day, 1, "strategy=single", path)}
    for number in (2, 4):
        for way in ("ddp", "fsdp", "ddp comm=ring")[: 3 if number == 2 else 2]:
            words = f"strategy={way}"
            ways[f"{number} ranks, {way}"] = lambda path, n=number, w=words: _hash(day, n, w, path)
    return _one_hash(day.size(ways, dict(list(ways.items())[::4])))


def sockets(day: Day) -> Iterator[Row]:
    ways: dict[str, Callable[[Path], str]] = {"single": lambda path: _hash(day, 1, "strategy=single", path)}
    for way in day.size(("ddp", "fsdp"), ("fsdp",)):
        words = f"strategy={way}"
        ways[f"2 ranks by host IDs, {way}"] = lambda path, w=words: _hash(day, 2, w, path, by_host=True)
    return _one_hash(ways)


def moves(day: Day) -> Iterator[Row]:
    """Compare a run that is resumed with two other strategies with an uninterrupted run."""
    steps = day.size(20, 4)

    def resumed(path: Path) -> str:
        saves = f"checkpoint.every_steps={steps // 4} resume=auto"
        sharded = "checkpoint=sharded checkpoint.async=true"
        _hash(day, 2, f"strategy=ddp {sharded} {saves} train.max_steps={steps // 2}", path)
        _hash(day, 4, f"strategy=fsdp {saves} train.max_steps={steps * 3 // 4}", path)
        return _hash(day, 1, f"strategy=single {saves} train.max_steps={steps}", path)

    single = f"strategy=single train.max_steps={steps}"
    return _one_hash({"single": lambda path: _hash(day, 1, single, path), "ddp, fsdp, single": resumed})


def _hash(day: Day, num_ranks: int, words: str, run_dir: Path, by_host: bool = False) -> str:
    steps = () if "max_steps" in words else (f"train.max_steps={day.size(20, 2)}",)
    result = train(day, num_ranks, *EXACT, *words.split(), *steps, run_dir=run_dir, by_host=by_host)
    return str(result["param_sha256"])


def _one_hash(ways: Mapping[str, Callable[[Path], str]]) -> Iterator[Row]:
    first = None
    for name, way in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = way(Path(folder, "run"))
            except CommandError as error:
                yield Row(f"exact, {name}", None, bar="one hash", ok=False, note=str(error))
                continue
        first = found if first is None else first
        yield Row(f"exact, {name}", None, bar="one hash", ok=found == first, note=found[:16])


def races(day: Day) -> Iterator[Row]:
    """Run with torch's sanitizer, which raises if streams access memory without waiting."""
    for way in day.size(("ddp comm=native", "ddp comm=ring", "fsdp"), ("ddp comm=ring",)):
        with tempfile.TemporaryDirectory() as folder:
            words = [*f"strategy={way}".split(), f"train.max_steps={day.size(5, 2)}"]
            watch = {"TORCH_CUDA_SANITIZER": "1"} if day.on_gpu else {}
            try:
                train(day, 2, *words, run_dir=Path(folder, "run"), variables=watch)
                yield Row(f"races, {way}", 0, "", "none", True)
            except CommandError as error:
                yield Row(f"races, {way}", None, bar="none", ok=False, note=str(error))


def verify(day: Day) -> Iterator[Row]:
    """Check that a flipped bit is found by another rank, and measure the cost of verification."""
    from trainer.config.schema import TrainConfig

    if "verify_every" not in {field.name for field in dataclasses.fields(TrainConfig)}:
        yield Row("verify", None, note="skipped: this version has no train.verify_every")
        return
    steps, exact = day.size(60, 4), ("strategy=ddp", *EXACT)
    with tempfile.TemporaryDirectory() as folder:
        times: dict[str, list[float]] = {"null": [], "20": []}
        for turn in range(day.size(3, 1)):
            for every, found in times.items():
                words = (*exact, f"train.verify_every={every}", f"train.max_steps={steps}")
                found.append(train(day, 2, *words, run_dir=Path(folder, f"{every}-{turn}"))["ms_per_step"])
        cost = statistics.median(times["20"]) / statistics.median(times["null"])
        yield Row("verify every 20 steps", cost, "x", "<= 1.02", cost <= 1.02 if day.on_gpu else None)
        flipped = inject("diverge", 1, steps // 2, task="trainer.tasks.LanguageModelling")
        run_dir = Path(folder, "flipped")
        try:
            words = (*exact, "train.verify_every=1", f"train.max_steps={steps}", *flipped)
            train(day, 2, *words, run_dir=run_dir)
            yield Row("a flipped bit", None, bar="found", ok=False, note="the run ended without an error")
        except CommandError as error:
            failure = json.loads((run_dir / "failure.json").read_text())
            named = "suspect" in failure
            yield Row("a flipped bit", None, bar="found", ok=named, note=str(failure if named else error))


def challenged(day: Day) -> Iterator[Row]:
    """Kill ranks that share the GPU at random moments."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "trainer.exact.challenge", "--seed=4", f"--folder={folder}"]
        words += ["--minutes", day.size("1", "0.01"), "--device", "cuda" if day.on_gpu else "cpu"]
        try:
            output = python(day, words, timeout_s=400)
        except CommandError as error:
            yield Row("challenge", None, bar="same bits", ok=False, note=str(error))
            return
    legs = re.findall(r"^leg .*", output, re.M)
    yield Row("challenge", len(legs), "legs", "same bits", "same bits" in output, legs[-1])
