"""Two ranks on one GPU through NCCL 2.30 or later: every all-reduce, by hand and recorded, right or wrong."""

import json
import os
import subprocess
import sys

import torch

from benchmarks.gpu.day import Day, Row


def measure(day: Day) -> list[Row]:
    """`NCCL_LIBRARY` names the libnccl.so to take in place of torch's own."""
    library = os.environ.get("NCCL_LIBRARY")
    if day.on_gpu and library is None and torch.cuda.nccl.version() < (2, 30):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return [Row("two ranks on one GPU", None, note=f"needs NCCL 2.30, here is {version}: see --nccl")]
    everything = ["--sizes", day.size("4K,4M,25M", "4K"), "--rounds", day.size("20", "1")]
    if day.dry:
        everything += ["--algorithms", "native,ring"]
    ways = {"by hand": [], "bf16 sent": ["--wire-dtype", "bf16"]} if day.on_gpu else {"by hand": []}
    if day.on_gpu:
        ways |= {"segments of 2 MiB": ["--segment-mb", "2"], "recorded": ["--cuda-graph"]}
    rows = []
    for name, options in ways.items():
        rows += _bench(day, name, library, [*everything, *options])
    return rows


def _bench(day: Day, name: str, library: str | None, options: list[str]) -> list[Row]:
    file = day.out / f"ranks-{name.replace(' ', '_')}.json"
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "OMP_NUM_THREADS": "1"}
    if library is not None:
        environment["LD_PRELOAD"] = library
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, "-m", "trainer.comm.bench", "--json", str(file), *options]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=day.size(140, 600), check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"")[-1500:].decode(errors="replace")
        return [Row(f"two ranks, {name}", None, ok=False, note=f"hangs: {said}")]
    if not file.exists():
        return [Row(f"two ranks, {name}", None, ok=False, note=(ended.stdout + ended.stderr)[-1500:])]
    return [
        Row(
            f"two ranks, {name}, {row['algorithm']}, {row['size']:,} bytes",
            row["seconds"] * 1e3,
            "ms",
            "right",
            row["wrong"] == 0,
        )
        for row in json.loads(file.read_text())["rows"]
    ]
