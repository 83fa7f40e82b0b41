"""Models too large for a single process: the cost of starting one, and of hashing and saving it.

    python -m benchmarks.big_model --part start     7 B parameters as rank 0 of a fake world of 64
    python -m benchmarks.big_model --part train     400 M under fsdp on 4 real ranks (12 GB), as predicted

`start` builds a GPT on the meta device, and fills and shards it unit by unit, with the values of a whole
model; only the other 63 ranks are simulated. `train` makes two steps, hashes the model and saves
it in full: rank 0 should need a shard of one tensor for that, not the model. It ends with the hash of the
initial model, under fsdp and whole.
"""

import argparse
import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_table import SHARED, predict, resident_at_rest, return_freed_memory, status
from tests.ranks import run_ranks
from tests.runs import context_of

SEVEN_BILLION = {"width": 4096, "depth": 34, "num_heads": 32, "vocab_size": 50304, "block_size": 2048}
FOUR_HUNDRED_MILLION = ("model.width=1024", "model.depth=28", "model.num_heads=16", "model.vocab_size=50304")
RANKS, WORLD = 4, 64


def start_seven_billion() -> dict[str, float]:
    """Seconds, and the peak of the resident set in GB, of one rank of 64; and the set before the model."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    from models.gpt import GPT
    from tests.runs import settings
    from trainer.distributed.process_group import Dist
    from trainer.meta_init.deferred import deferred
    from trainer.strategies import build_strategy
    from trainer.strategies.base import parameter_count

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=fake_pg.FakeStore())
    hosts = tuple(rank // 8 for rank in range(WORLD))
    here = Dist(0, 0, WORLD, 8, hosts, torch.device("cpu"), "fake")
    strategy = build_strategy(settings("strategy=fsdp", "model=gpt", "data=text"), here)
    before, began = status("VmRSS"), time.perf_counter()
    model = deferred(partial(GPT, **SEVEN_BILLION), seed=0)
    assert not model.notes
    built, number = time.perf_counter(), parameter_count(model.module.parameters())
    wrapped = strategy.wrap(model.module, model.fill)
    ended = time.perf_counter()
    own = sum(parameter.to_local().nbytes for parameter in wrapped.parameters())  # type: ignore[attr-defined]
    assert not any(parameter.is_meta for parameter in wrapped.parameters())
    return {
        "parameters (B)": number / 1e9,
        "built on meta (s)": built - began,
        "filled and sharded (s)": ended - built,
        "processor (s)": time.process_time(),
        "of that its shards (GB)": own / 1e9,
        "before the model (GB)": before / 1e9,
        "peak resident (GB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def train(run_dir: Path, small: tuple[str, ...], large: tuple[str, ...]) -> dict[str, Any]:
    """GB above rest on this rank: of two steps, then of hashing and of saving."""
    from trainer.loop import fit, save
    from trainer.training.run_hash import parameters_sha256

    return_freed_memory()
    with context_of(*small, f"run_dir={run_dir / 'small'}") as context:
        fit(context)
        parameters_sha256(context.state.model)
        save(context)
    del context
    base, found = resident_at_rest(), {}
    with context_of(*large, f"run_dir={run_dir / 'large'}") as context:
        found["start"] = status("VmHWM") - base
        found["hash at start"] = parameters_sha256(context.state.model)
        resident_at_rest()  # restarts the peak
        fit(context)
        found["steps"] = status("VmHWM") - base
        held = resident_at_rest()
        began = time.perf_counter()
        parameters_sha256(context.state.model)
        found["hashing adds"], found["hash s"] = status("VmHWM") - held, time.perf_counter() - began
        held = resident_at_rest()
        context.checkpointer._last_saved = None  # the run's end may have saved this step
        save(context)
        found["saving adds"] = status("VmHWM") - held
    return found


def hash_at_start(run_dir: Path, large: tuple[str, ...]) -> str:
    from trainer.training.run_hash import parameters_sha256

    with context_of(*large, f"run_dir={run_dir}") as context:
        return parameters_sha256(context.state.model)


def trains() -> None:
    common = (*SHARED, "train.max_steps=2", "checkpoint=full", "checkpoint.every_epochs=null")
    size = (*FOUR_HUNDRED_MILLION, "data.dataset.block_size=64", "train.micro_batch_size=1")
    small = (*common, "strategy=fsdp", "model.width=32", "model.depth=2", "model.num_heads=2")
    large = (*common, *size, f"train.global_batch_size={RANKS}")
    sharded = (*large, "strategy=fsdp")
    predicted = run_ranks(predict, 1, sharded, RANKS, 1, init=False, timeout_s=900)[0]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(train, RANKS, Path(folder), small, sharded, init=False, timeout_s=3000)
        print(f"{'MB':24} predicted   by rank")
        for key in ("start", "steps", "hashing adds", "saving adds"):
            listed = " ".join(f"{each[key] / 1e6:10.1f}" for each in found)
            print(f"{key:24} {f'{predicted / 1e6:.1f}' if key == 'steps' else '':>9} {listed}")
        print(f"hashed in {found[0]['hash s']:.1f} s")
        whole = run_ranks(hash_at_start, 1, Path(folder) / "w", (*large, "strategy=single"), init=False)[0]
        print(f"hash at start: fsdp {found[0]['hash at start'][:16]}, whole {whole[:16]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("start", "train"), required=True)
    if parser.parse_args().part == "train":
        trains()
        return
    for name, value in run_ranks(start_seven_billion, 1, init=False, timeout_s=3600)[0].items():
        print(f"{name:26} {value:8.2f}")


if __name__ == "__main__":
    main()
