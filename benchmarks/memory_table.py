"""Compare the measured memory of each strategy with the prediction of `planner.memory`.

    python -m benchmarks.memory_table [--ranks 4] [--width 512] [--depth 8] [--only fsdp,ddp]

A GPT with AdamW makes three steps. Memory is the peak of a rank's resident set minus its size after training
a small model, which loads all code. Unlike in a normal run, freed memory is returned to the system at once
(mallopt), so that the numbers exclude memory that the C library keeps. CPU offload needs a GPU and is not
included.
"""

import argparse
import ctypes
import gc
import json
import os
import tempfile
from pathlib import Path

from tests.ranks import run_ranks
from tests.runs import context_of, settings

SHARED = ("data=text", "model=gpt", "optim=adamw", "schedule=constant", "train.clip_grad_norm=1.0")
SHARED += ("train.max_steps=3", "train.eval_every_epochs=0", "checkpoint.every_epochs=null")
SHARED += ("logger=jsonl", "train.check_replicas_every=null")
RECOMPUTE = ("strategy.activation_checkpointing=true",)
TWO_MICRO_BATCHES = ("train.global_batch_size={twice}",)
CASES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp",),
    "ddp, checkpointing": ("strategy=ddp", *RECOMPUTE),
    "fsdp": ("strategy=fsdp",),
    "fsdp, no resharding": ("strategy=fsdp", "strategy.reshard_after_forward=false"),
    "fsdp, checkpointing": ("strategy=fsdp", *RECOMPUTE),
    "fsdp, every 2nd unit": ("strategy=fsdp", *RECOMPUTE, "strategy.activation_checkpointing_every=2"),
    "fsdp, matmul kept": ("strategy=fsdp", *RECOMPUTE, "strategy.activation_checkpointing_keep=[matmul]"),
    "fsdp, 2 micro-batches": ("strategy=fsdp", *TWO_MICRO_BATCHES),
    "fsdp, 2, reduced each": ("strategy=fsdp", *TWO_MICRO_BATCHES, "strategy.reduce_every_micro_batch=true"),
    "hybrid": ("strategy=fsdp", "strategy.shard_group=2"),
    "hybrid, checkpointing": ("strategy=fsdp", "strategy.shard_group=2", *RECOMPUTE),
    "servers=1": ("strategy=parameter_server",),
    "servers=2": ("strategy=parameter_server", "strategy.servers=2"),
    "servers=all": ("strategy=parameter_server", "strategy.servers=all"),
}
DEDICATED = {"servers=1": 1, "servers=2": 2}  # number of ranks that are only servers
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def status(key: str) -> int:
    """Return a value in bytes from /proc for this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    """Return free memory to the system, reset the peak, and return the size of the resident set."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def return_freed_memory() -> None:
    """Make the C library return freed memory to the system at once instead of keeping it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 16)


def measure(run_dir: Path, small: tuple[str, ...], large: tuple[str, ...]) -> int:
    """Return this rank's peak resident set in a run of `large`, minus its size after a run of `small`."""
    from trainer.loop import fit

    return_freed_memory()
    with context_of(*small, f"run_dir={run_dir / 'small'}") as context:
        fit(context)
    del context
    base = resident_bytes()
    with context_of(*large, f"run_dir={run_dir / 'large'}") as context:
        fit(context)
        return status("VmHWM") - base


def predict(case: tuple[str, ...], ranks: int, micro: int) -> int:
    """Return the prediction for this rank on a CPU, without other ranks.

    Call once per process, because torch caches device meshes.
    """
    from planner.dry_run import DryRun
    from planner.pretend import DryRunWorld

    config = settings(*case)
    with DryRun(config).under(config, DryRunWorld(ranks, ranks, int(os.environ["RANK"]))) as stage:
        accumulation = config.train.global_batch_size // micro // stage.num_replicas
        footprint = stage.footprint(micro, accumulation)
    return footprint.peak + footprint.host


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--width", type=int, default=512)
    add("--depth", type=int, default=8)
    add("--block-size", type=int, default=128)
    add("--micro", type=int, default=4, help="micro-batch size")
    add("--only", default="", help="comma-separated prefixes of cases")
    add("--json", type=Path)
    chosen = parser.parse_args()
    size = (*SHARED, f"model.width={chosen.width}", f"model.depth={chosen.depth}", "model.num_heads=8")
    size += (f"data.dataset.block_size={chosen.block_size}", f"train.micro_batch_size={chosen.micro}")
    small = (*SHARED, "model.width=32", "model.depth=2", "model.num_heads=2", "data.dataset.block_size=16")
    found = {}
    print(f"{'MB per rank':24} {'predicted':>40} {'measured':>40}  ratios")
    for name, options in CASES.items():
        if not name.startswith(tuple(chosen.only.split(","))):
            continue
        batch = chosen.micro * (chosen.ranks - DEDICATED.get(name, 0))
        options = tuple(option.format(twice=2 * batch) for option in options)
        large = (*size, f"train.global_batch_size={batch}", *options)
        args = (large, chosen.ranks, chosen.micro)
        predicted = run_ranks(predict, chosen.ranks, *args, init=False, timeout_s=900, fresh=True)
        own = (option for option in options if option.startswith("strategy"))
        little = (*small, f"train.global_batch_size={batch}", *own)
        with tempfile.TemporaryDirectory() as folder:
            runs = (Path(folder), little, large)
            measured = run_ranks(measure, chosen.ranks, *runs, init=False, timeout_s=3000)
        found[name] = {"predicted": predicted, "measured": measured}
        listed = [" ".join(f"{value / 1e6:9.1f}" for value in values) for values in (predicted, measured)]
        ratios = " ".join(f"{p / m:.3f}" for p, m in zip(predicted, measured, strict=True))
        print(f"{name:24} {listed[0]:>40} {listed[1]:>40}  {ratios}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
