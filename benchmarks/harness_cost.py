"""Compare Ringmaster with a plain PyTorch loop: time per step, and time to the first step.

Alternates between train.py and a plain PyTorch loop (this file with --plain) for the same work, each in
separate processes: the MLP on the digits, batch size 64 per process, SGD with momentum, the loss logged every
50 steps. The plain loop indexes a tensor of all data for each batch, which is the fastest method;
`benchmarks/peers.py` also has a loop that reads single samples. Prints each pair and the medians of the
ratios. Start-up is from the start of the launcher to the end of the first step.

    python benchmarks/harness_cost.py                   one process
    python benchmarks/harness_cost.py --processes 2     DDP on gloo
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCH, EPOCHS, LOG_EVERY = 64, 20, 50


def plain_loop(out: Path) -> None:
    """Train without checkpoints, evaluation and checks."""
    import torch
    from torch import nn
    from torch.utils.data.distributed import DistributedSampler
    from torch.utils.tensorboard import SummaryWriter

    sys.path.insert(0, str(ROOT))
    from trainer.data.digits import Digits

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    digits = Digits(split="train")
    images, labels = digits.__getitems__(list(range(len(digits))))
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model: nn.Module = nn.Sequential(*layers)
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    sampler: DistributedSampler[int] = DistributedSampler(digits, world_size, rank)
    steps_per_epoch = len(sampler) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    writer = SummaryWriter(str(out.parent)) if rank == 0 else None
    step, seconds, first_step = 0, 0.0, 0.0
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        model.train()
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler))
        for chosen in order[: steps_per_epoch * BATCH].split(BATCH):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first_step = first_step or time.time()
            step += 1
            if writer and step % LOG_EVERY == 0:
                writer.add_scalar("loss", loss.item(), step)
        if epoch > 0:
            seconds += time.perf_counter() - begin
    if world_size > 1:
        torch.distributed.destroy_process_group()
    if rank == 0:
        steady_steps = (EPOCHS - 1) * steps_per_epoch
        out.write_text(json.dumps({"ms_per_step": 1e3 * seconds / steady_steps, "first_step": first_step}))


def launch(processes: int, *arguments: str) -> float:
    """Run train.py or the plain loop to its end, and return the time at which it was started."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.time()
    command = [*launcher, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}status {done.returncode} of {' '.join(command)}")
    return begin


def measure_plain(processes: int, scratch: Path) -> tuple[float, float]:
    out = scratch / "plain.json"
    begin = launch(processes, __file__, "--plain", str(out))
    result = json.loads(out.read_text())
    return result["ms_per_step"], result["first_step"] - begin


def measure_ringmaster(processes: int, scratch: Path) -> tuple[float, float]:
    strategy = "single" if processes == 1 else "ddp"
    common = [f"strategy={strategy}", f"train.global_batch_size={BATCH * processes}", "schedule=constant"]
    common += [
        "data.task.label_smoothing=0",
        "optim.weight_decay=0",
        "optim.lr=0.05",
    ]
    common += ["train.eval_every_epochs=0", "checkpoint.every_epochs=null"]
    launch(
        processes,
        "train.py",
        *common,
        f"train.epochs={EPOCHS}",
        f"train.log_every_steps={LOG_EVERY}",
        f"run_dir={scratch}/steps",
    )
    ms_per_step = json.loads((scratch / "steps" / "result.json").read_text())["ms_per_step"]

    # A run that logs each step, because log lines have timestamps.
    begin = launch(
        processes,
        "train.py",
        *common,
        "train.max_steps=2",
        "train.log_every_steps=1",
        f"run_dir={scratch}/first",
    )
    lines = (scratch / "first" / "train.log").read_text().splitlines()
    stamp = next(line for line in lines if " step 1/" in line)[:23]
    return ms_per_step, datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--plain", type=Path, metavar="OUT", help="run the plain loop, and write its metrics to OUT"
    )
    arguments = parser.parse_args()
    if arguments.plain:
        plain_loop(arguments.plain)
        return
    ratios: list[tuple[float, float]] = []
    print(f"{arguments.processes} process(es), plain PyTorch loop and Ringmaster: ms per step, start-up in s")
    print("  " + "   ".join(2 * [f"{'plain':>8} {'Ringmaster':>10} {'ratio':>7}"]))
    for _ in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as scratch:
            plain_ms, plain_s = measure_plain(arguments.processes, Path(scratch))
            own_ms, own_s = measure_ringmaster(arguments.processes, Path(scratch))
        ratios.append((own_ms / plain_ms, own_s / plain_s))
        step, start = ratios[-1]
        print(
            f"  {plain_ms:8.3f} {own_ms:10.3f} {step:7.2f}   {plain_s:8.2f} {own_s:10.2f} {start:7.2f}",
            flush=True,
        )
    step, start = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median ratio: step {step:.2f}, start-up {start:.2f}")


if __name__ == "__main__":
    main()
