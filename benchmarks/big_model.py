"""Measure the memory for starting, hashing and saving a model that is too large for one GPU.

    python -m benchmarks.big_model     400 M parameters with FSDP on 4 ranks (12 GB)

Makes two steps, hashes the model and saves it in full. Hashing and saving should need memory for one tensor's
shard on rank 0, not for the whole model. Then prints the hash of the initial model, built with FSDP and in
one process.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory_table import SHARED, predict, resident_bytes, return_freed_memory, status
from tests.ranks import run_ranks
from tests.runs import context_of

FOUR_HUNDRED_MILLION = ("model.width=1024", "model.depth=28", "model.num_heads=16", "model.vocab_size=50304")
RANKS = 4


def train(run_dir: Path, small: tuple[str, ...], large: tuple[str, ...]) -> dict[str, Any]:
    """Return this rank's additional memory, in bytes, for two steps, for hashing and for saving."""
    from trainer.loop import fit, save
    from trainer.report.run_hash import parameters_sha256

    return_freed_memory()
    with context_of(*small, f"run_dir={run_dir / 'small'}") as context:
        fit(context)
        parameters_sha256(context.state.model)
        save(context)
    del context
    base, found = resident_bytes(), {}
    with context_of(*large, f"run_dir={run_dir / 'large'}") as context:
        found["start"] = status("VmHWM") - base
        found["initial hash"] = parameters_sha256(context.state.model)
        resident_bytes()  # resets the peak
        fit(context)
        found["steps"] = status("VmHWM") - base
        before = resident_bytes()
        start = time.perf_counter()
        parameters_sha256(context.state.model)
        found["hashing"], found["hash s"] = status("VmHWM") - before, time.perf_counter() - start
        before = resident_bytes()
        context.checkpointer._last_saved = None  # save again if the end of the run has saved this step
        save(context)
        found["saving"] = status("VmHWM") - before
    return found


def initial_hash(run_dir: Path, large: tuple[str, ...]) -> str:
    from trainer.report.run_hash import parameters_sha256

    with context_of(*large, f"run_dir={run_dir}") as context:
        return parameters_sha256(context.state.model)


def main() -> None:
    common = (*SHARED, "train.max_steps=2", "checkpoint.every_epochs=null")
    size = (*FOUR_HUNDRED_MILLION, "data.dataset.block_size=64", "train.micro_batch_size=1")
    small = (*common, "strategy=fsdp", "model.width=32", "model.depth=2", "model.num_heads=2")
    large = (*common, *size, f"train.global_batch_size={RANKS}")
    sharded = (*large, "strategy=fsdp")
    predicted = run_ranks(predict, 1, sharded, RANKS, 1, init=False, timeout_s=900)[0]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(train, RANKS, Path(folder), small, sharded, init=False, timeout_s=3000)
        print(f"{'additional MB':24} predicted   measured, by rank")
        for key in ("start", "steps", "hashing", "saving"):
            listed = " ".join(f"{each[key] / 1e6:10.1f}" for each in found)
            print(f"{key:24} {f'{predicted / 1e6:.1f}' if key == 'steps' else '':>9} {listed}")
        print(f"time of hashing: {found[0]['hash s']:.1f} s")
        whole = run_ranks(initial_hash, 1, Path(folder) / "w", (*large, "strategy=single"), init=False)[0]
        print(f"initial hash: FSDP {found[0]['initial hash'][:16]}, one process {whole[:16]}", flush=True)


if __name__ == "__main__":
    main()
