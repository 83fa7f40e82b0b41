"""Compare the CPU time of a training step of a small GPT with a loop like nanoGPT's.

Three variants train at the same time on one core, each in its own process: nanoGPT's loop with a model like
nanoGPT's (separate views of heads, exact GELU), nanoGPT's loop with models.gpt, and Ringmaster with
models.gpt. All have 842,496 parameters, block size 128, batch size 16, AdamW, a cosine schedule with warm-up,
clipping at 1, weight decay for matrices only, and the same text. Prints the CPU time per step, and the
median, minimum and maximum of each ratio over the rounds. Other load on the machine slows all variants
equally.

    python -m benchmarks.nanogpt_loop [--rounds 5] [--steps 60] [--switch ema.decay=0.999 ...]
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.gpt import GPT
from trainer.data.text.in_memory import python_reference

BLOCK, BATCH, WIDTH, DEPTH, HEADS, STEPS = 128, 16, 128, 4, 4, 100_000
OVERRIDES = (
    *("experiment=text_gpt", "strategy=single", f"data.dataset.block_size={BLOCK}", "train.epochs=100000"),
    *(f"train.global_batch_size={BATCH}", f"train.max_steps={STEPS}", "train.eval_every_epochs=0"),
    *("optim.lr=1e-3", "checkpoint.every_epochs=null", "schedule.warmup_steps=100"),
)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.mix(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.mixed(y.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.drop(self.down(self.gelu(self.up(self.norm_2(x)))))


class PlainGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.norm = nn.ModuleList(PlainBlock() for _ in range(DEPTH)), nn.LayerNorm(WIDTH)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_loop(model: nn.Module) -> Iterator[None]:
    """Run a training loop like nanoGPT's; yield after each step."""
    data = python_reference()
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        offsets = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in offsets])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in offsets])
        return x, y

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model.train()
    x, y = batch()
    for step in range(STEPS):
        warm = (step + 1) / 101 if step < 100 else 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warm
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        x, y = batch()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            loss.item()
        yield


@contextlib.contextmanager
def ringmaster_loop(overrides: Sequence[str]) -> Iterator[Iterator[None]]:
    from tests.runs import steps_of
    from trainer.assemble import assemble
    from trainer.distributed.process_group import process_group
    from trainer.launch.signals import StopRequest

    with contextlib.ExitStack() as stack:
        stop_request = stack.enter_context(StopRequest())
        run_dir = stack.enter_context(tempfile.TemporaryDirectory())
        cfg = settings(f"run_dir={run_dir}", *overrides)
        ranks = stack.enter_context(process_group(cfg.distributed))
        context = assemble(cfg, "benchmark", ranks, stop_request)
        context.report.run_log.open()
        stack.callback(context.report.run_log.close)
        yield steps_of(context)


PLAIN_VARIANTS = {
    "nanoGPT loop, its model": lambda: contextlib.nullcontext(plain_loop(PlainGPT())),
    "nanoGPT loop, models.gpt": lambda: contextlib.nullcontext(plain_loop(GPT(256, BLOCK))),
}
RINGMASTER = "Ringmaster, models.gpt"


def cpu_ms(name: str, steps: int) -> float:
    """Return the CPU time per step of this process, in ms, after five warm-up steps."""
    with (
        PLAIN_VARIANTS[name]()
        if name in PLAIN_VARIANTS
        else ringmaster_loop(() if name == RINGMASTER else name.split()) as loop
    ):
        for _ in range(5):
            next(loop)
        begin = time.process_time()
        for _ in range(steps):
            next(loop)
        return 1e3 * (time.process_time() - begin) / steps


def cpu_ms_at_once(names: Sequence[str], steps: int, core: int) -> list[float]:
    """Return the CPU time per step of each variant; all run at the same time on one core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.nanogpt_loop"]
    children = [
        subprocess.Popen(
            [*command, f"--steps={steps}", "--variant", name],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    printed = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit(1)
    return [float(text.splitlines()[-1]) for text in printed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument(
        "--switch", nargs="*", default=[], help="settings, each measured as a variant of Ringmaster"
    )
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # the variant that a child process runs
    arguments = parser.parse_args()
    if arguments.variant:
        print(cpu_ms(arguments.variant, arguments.steps))
        return
    names = [*PLAIN_VARIANTS, RINGMASTER, *arguments.switch]
    rounds = [cpu_ms_at_once(names, arguments.steps, arguments.core) for _ in range(arguments.rounds)]
    found = dict(zip(names, zip(*rounds, strict=True), strict=True))
    for name, values in found.items():
        one, other = (values, found[RINGMASTER]) if name in arguments.switch else (found[RINGMASTER], values)
        ratios = sorted(a / b for a, b in zip(one, other, strict=True))
        words = "this / Ringmaster" if name in arguments.switch else "Ringmaster / this"
        print(
            f"{name:24s} {statistics.median(values):8.2f} ms CPU time per step   {words}: "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def settings(*overrides: str) -> Any:
    from hydra import compose, initialize_config_dir

    from trainer.config import load
    from trainer.config.overrides import CONF

    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load(compose("train", overrides=[*OVERRIDES, *overrides]))


if __name__ == "__main__":
    main()
