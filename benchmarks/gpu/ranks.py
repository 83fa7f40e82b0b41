"""Check every all-reduce on two ranks on two GPUs, or on one GPU with NCCL 2.30 or later."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.day import Day, Row

RUNS = (
    "ddp comm=native",
    "ddp comm=ring",
    "ddp comm=tree",
    "ddp comm=halving_doubling",
    "ddp comm=hierarchical",
    "ddp comm=master_worker",
    "fsdp comm=native",
    "fsdp strategy.shard_group=1",
    "parameter_server",
)
TRAIN = (
    *("experiment=text_gpt", "data.dataset.block_size=64", "train.global_batch_size=16", "logger=jsonl"),
    *("train.eval_every_epochs=0", "checkpoint.every_epochs=null", "schedule.warmup_steps=0"),
)


def measure(day: Day) -> Iterator[Row]:
    """`NCCL_LIBRARY` is the libnccl.so to use in place of torch's own."""
    library = os.environ.get("NCCL_LIBRARY")
    shared = torch.cuda.device_count() == 1
    if day.on_gpu and shared and library is None and torch.cuda.nccl.version() < (2, 30):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Row("two ranks on one GPU", None, note=f"needs NCCL 2.30, here is {version}: see --nccl")
        return
    everything = ["--sizes", day.size("4K,4M,25M", "4K"), "--rounds", day.size("20", "1")]
    if day.dry:
        everything += ["--algorithms", "native,ring"]
    ways = {"by hand": [], "bf16 sent": ["--wire-dtype", "bf16"]} if day.on_gpu else {"by hand": []}
    if day.on_gpu:
        ways["segments of 2 MiB"] = ["--segment-mb", "2"]
    for name, options in ways.items():
        yield from _bench(day, name, library, [*everything, *options])
    yield from _training(day, library)


def _training(day: Day, library: str | None) -> Iterator[Row]:
    """Runs of two ranks, each with another all-reduce: all must have the loss of DDP's own."""
    native = None
    for choice in day.size(RUNS, RUNS[1:2]):
        with tempfile.TemporaryDirectory() as run_dir:
            options = (
                *f"strategy={choice}".split(),
                *TRAIN,
                f"train.max_steps={day.size(30, 2)}",
                f"run_dir={run_dir}/run",
            )
            ended = _torchrun(day, ["train.py", *options], library, day.size(60, 600))
            what = f"two ranks train, {choice}"
            if ended.returncode:
                yield Row(what, None, ok=False, note=(ended.stdout + ended.stderr)[-1500:])
                continue
            result = json.loads(Path(run_dir, "run/result.json").read_text())
        loss = result["train/loss"]
        native = loss if native is None else native
        near = abs(loss - native) <= 1e-3 * native
        yield Row(what, result["ms_per_step"], "ms/step", "same loss", near, f"loss {loss:.5f}")


def _torchrun(
    day: Day, command: list[str], library: str | None, timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Two ranks that may share a GPU; one that hangs is ended, with status 124."""
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "OMP_NUM_THREADS": "1"}
    if library is not None:
        environment["LD_PRELOAD"] = library
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    if day.dry:  # loading torch three times takes longer than these sizes
        launcher += ["--run-path", "--start-method=fork"]
    process = subprocess.Popen(
        [*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which would hold the GPU
        said, _ = process.communicate()
        return subprocess.CompletedProcess(command, 124, f"hangs: {said}", "")
    return subprocess.CompletedProcess(command, process.returncode, said, "")


def _bench(day: Day, name: str, library: str | None, options: list[str]) -> Iterator[Row]:
    file = day.out / f"ranks-{name.replace(' ', '_')}.json"
    file.unlink(missing_ok=True)
    bench = day.size(["-m", "benchmarks.allreduce"], ["benchmarks/allreduce.py"])
    ended = _torchrun(day, [*bench, "--json", str(file), *options], library, day.size(100, 600))
    if not file.exists():
        yield Row(f"two ranks, {name}", None, ok=False, note=ended.stdout[-1500:])
        return
    for row in json.loads(file.read_text())["rows"]:
        what = f"two ranks, {name}, {row['algorithm']}, {row['size']:,} bytes"
        yield Row(what, row["seconds"] * 1e3, "ms", "right", row["wrong"] == 0)
