"""Compute what grows with ranks, parameters and time in large runs, from shapes only.

Models of 1, 8 and 70 billion parameters with the layers of Llama 3, AdamW and FSDP with 8 ranks per host:

    index       size of the index of tensors in state.json, time to read it, memory for reading it
    manifest    size of manifest.json, with a hash of each block of each file
    kept        memory of rank 0 for 2,000 kept checkpoints
    opens       files that a rank opens, and reads, to resume on the same number of ranks (maximum over ranks)
    suspects    KB that each host reads from other hosts at each check while a rank is suspected
    compared    KB that a rank receives to check that all ranks have the same model
    sockets     sockets of rank 0, which has the most: for each other rank, two of gloo (default group and
                checkpoint group) and one of the store; one more for each rank on its host. `--sockets` counts
                them in /proc in runs of 3, 6 and 12 ranks on this machine

    python -m benchmarks.growth [--sockets] [--json FILE]
"""

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.programs import started
from trainer.checkpoint.layout import Plan, index_from_json
from trainer.checkpoint.manifest import (
    BLOCK_BYTES,
    FileDigest,
    Manifest,
    blocks_to_verify,
    manifest_text,
)
from trainer.failures.diagnosis import Observed
from trainer.failures.host_reports import _report
from trainer.tensors.local_shard import num_rows, rows_of_shard

RANKS, PER_HOST, KEPT = (8, 256, 2048), 8, 2000
# Llama 3: layers, width, width of the MLP, width of keys and values; vocabulary of 128,256 tokens.
MODELS = {"1 B": (16, 2048, 8192, 512), "8 B": (32, 4096, 14336, 1024), "70 B": (80, 8192, 28672, 1024)}
TOKENS = 128_256


def state_of(model: str) -> dict[str, Tensor]:
    """Return the meta tensors of a checkpoint: weights, and AdamW's two moments and step counts."""
    layers, width, hidden, keys = MODELS[model]
    shapes: dict[str, tuple[int, ...]] = {"embed": (TOKENS, width), "head": (TOKENS, width), "norm": (width,)}
    for layer in range(layers):
        matrices = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
        matrices |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        norms = {"norm1": (width,), "norm2": (width,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in (matrices | norms).items()}
    found = {}
    for name, shape in shapes.items():
        found[f"model.{name}"] = torch.empty(shape, device="meta")
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{name}.{moment}"] = torch.empty(shape, device="meta")
        found[f"optimizer.state.{name}.step"] = torch.empty((), device="meta")
    return found


def saved_by(state: dict[str, Tensor], world_size: int) -> tuple[Plan, Manifest]:
    """Return the plan and the manifest of a save of `state` on `world_size` ranks."""
    everyone = list(range(world_size))
    plan = Plan("sharded", world_size, {n: everyone if t.ndim else [0] for n, t in state.items()}, {})
    sizes: dict[str, int] = {}
    for name, tensor in state.items():
        for part, rank in enumerate(plan.writers[name]):
            begin, end = rows_of_shard(num_rows(tensor.shape), part, len(plan.writers[name]))
            row_bytes = tensor.numel() // max(1, num_rows(tensor.shape)) * 4
            file = plan.file_of(name, rank)
            sizes[file] = sizes.get(file, 0) + (end - begin) * row_bytes
    files = {n: FileDigest(size, ("0" * 64,) * max(1, -(-size // BLOCK_BYTES))) for n, size in sizes.items()}
    plan = plan.indexed(state)
    files["state.json"] = FileDigest(len(plan.index), ("0" * 64,))
    return plan, Manifest("sharded", 1, time.time(), files, "run", "trunk")


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read_index(text: str) -> dict[str, float]:
    tracemalloc.start()
    index = index_from_json(json.loads(text))
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert index
    seconds = min(timed(lambda: index_from_json(json.loads(text))) for _ in range(5))
    return {"index MB": len(text) / 1e6, "index s": seconds, "index memory MB": memory / 1e6}


def opens(state: dict[str, Tensor], plan: Plan, manifest: Manifest, world_size: int) -> dict[str, float]:
    """Count the files of the rank that opens the most: manifest, state.json, its rows, verified files."""
    index, most = index_from_json(json.loads(plan.index)), (0, 0)
    for rank in {0, 1, world_size // 2, world_size - 1}:
        needed = set()
        for name, tensor in state.items():
            begin, end = rows_of_shard(num_rows(tensor.shape), rank, world_size) if tensor.ndim else (0, 1)
            needed |= {chunk.file for chunk in index[name].overlapping(begin, end)}
        verified = {name for name, _ in blocks_to_verify(manifest, rank, world_size)}
        most = max(most, (2 + len(needed) + len(verified), len(needed | verified)))
    return {"opens": float(most[0]), "files read": float(most[1])}


def kept_mb(manifest: Manifest) -> float:
    tracemalloc.start()
    kept = {Path(f"/runs/mine/checkpoints/step_{n:08d}"): manifest.summary for n in range(KEPT)}
    num_bytes = tracemalloc.get_traced_memory()[0]
    kept.clear()
    num_bytes -= tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return num_bytes / 1e6


def suspects_kb(world_size: int) -> float:
    of_host = [
        Observed(rank, 1, "node-0001", 4000 + rank, "backward", 48120, 192480, 12, 3, 0.0, 12.3, 0.1)
        for rank in range(PER_HOST)
    ]
    return len(_report("4000/17", of_host)) * (world_size // PER_HOST) / 1e3


def counted_sockets(strategy: str, num_ranks: int) -> int:
    """Return the largest number of open sockets of a rank in a run of `num_ranks` on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "metrics.jsonl"
        words = ("launch=local", f"launch.processes={num_ranks}", f"strategy={strategy}", "logger=jsonl")
        sizes = (
            f"train.global_batch_size={2 * num_ranks}",
            "train.max_steps=99999",
            "train.epochs=9999",
        )
        more = ("train.log_every_steps=1", f"run_dir={log.parent}", "distributed.device=cpu")
        with started("train.py", *words, *sizes, *more, forks=True) as program:
            deadline = time.monotonic() + 300
            while not log.exists():
                assert time.monotonic() < deadline, program.stdout + program.stderr
                time.sleep(0.5)
            return max(map(_sockets, program.ranks() or _children(program.pid)))


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _sockets(pid: int) -> int:
    links = (str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return sum(link.startswith("socket:") for link in links)


def growth(value: Callable[[int, str], float]) -> str:
    """Return what a value grows with: ranks (8 to 2,048), parameters (1 to 70 billion), both or neither."""
    by_ranks, by_size = value(2048, "70 B") / value(8, "70 B"), value(2048, "70 B") / value(2048, "1 B")
    words = [word for word, ratio in (("ranks", by_ranks), ("parameters", by_size)) if ratio > 2]
    return " and ".join(words) or "constant"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sockets", action="store_true", help="also count sockets in runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to a file")
    arguments = parser.parse_args()
    rows: dict[tuple[int, str], dict[str, float]] = {}
    for model in MODELS:
        state = state_of(model)
        for world_size in RANKS:
            plan, manifest = saved_by(state, world_size)
            rows[world_size, model] = {
                **read_index(plan.index),
                "manifest MB": len(manifest_text(manifest)) / 1e6,
                "kept MB": kept_mb(manifest),
                **opens(state, plan, manifest, world_size),
                "suspects KB": suspects_kb(world_size),
                "compared KB": world_size * 60 / 1e3,  # a pickled hash of 16 bytes from each rank
                "sockets": 3.0 * (world_size - 1) + PER_HOST - 1,
            }
    names = list(next(iter(rows.values())))
    print("| | " + " | ".join(f"{ranks:,} ranks, {model}" for ranks, model in rows) + " | grows with |")
    print("|---|" + "---|" * (len(rows) + 1))
    for name in names:
        values = [row[name] for row in rows.values()]
        cells = " | ".join(f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values)
        words = growth(lambda ranks, model, name=name: rows[ranks, model][name])  # type: ignore[misc]
        print(f"| {name} | {cells} | {words} |", flush=True)
    found: dict[str, Any] = {"torch": torch.__version__}
    found["rows"] = [{"ranks": ranks, "model": model, **row} for (ranks, model), row in rows.items()]
    if arguments.sockets:
        found["sockets"] = {}
        for strategy in ("ddp", "fsdp"):
            counts = {ranks: counted_sockets(strategy, ranks) for ranks in (3, 6, 12)}
            found["sockets"][strategy] = counts
            words = ", ".join(f"{count} with {ranks} ranks" for ranks, count in counts.items())
            print(f"sockets of a rank under {strategy}: {words}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
