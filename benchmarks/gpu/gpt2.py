"""Compare GPT-2 124M (block 1024, bf16, compiled) with nanoGPT's loop: tokens/s and MFU, in one process."""

import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.day import Day, Row, contexts, in_turns, ratio, steps

MFU_WANTED = 0.5


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.mix, self.mixed = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.mix(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class NanoGPT(nn.Module):
    """nanoGPT's default model: no biases, a vocabulary of 50304, the loss within the model."""

    def __init__(self, block: int, width: int, depth: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def nanogpt(day: Day, data: Path, batch_size: int, block: int, sizes: tuple[int, int, int]) -> Iterator[None]:
    """Run the training loop of nanoGPT's train.py on one GPU; yield after each step."""
    model: nn.Module = NanoGPT(block, *sizes, vocabulary=50304).to(day.device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=day.on_gpu or None)
    model = torch.compile(model)  # type: ignore[assignment]
    scaler = torch.amp.GradScaler(day.device.type, enabled=False)
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        tokens = np.memmap(data, np.uint16, mode="r")
        offsets = torch.randint(len(tokens) - block, (batch_size,), generator=generator).tolist()
        x = torch.stack([torch.from_numpy(tokens[i : i + block].astype(np.int64)) for i in offsets])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block].astype(np.int64)) for i in offsets])
        if not day.on_gpu:
            return x, y
        return (
            x.pin_memory().to(day.device, non_blocking=True),
            y.pin_memory().to(day.device, non_blocking=True),
        )

    x, y = batch()
    for step in range(1_000_000):
        rate = 6e-4 * ((step + 1) / 2001 if step < 2000 else 0.55 + 0.45 * math.cos(math.pi * step / 1e6))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(day.device.type, torch.bfloat16):
            loss = model(x, y)
        x, y = batch()  # while the GPU is busy with the forward pass
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            loss.item()
        yield


def tokens_file(folder: Path, count: int) -> Path:
    """Write random tokens with the frequencies of words."""
    drawn = np.random.default_rng(0).zipf(1.2, count) % 50257
    for name in ("train.bin", "val.bin"):
        drawn.astype(np.uint16).tofile(folder / name)
    return folder / "train.bin"


def measure(day: Day) -> list[Row]:
    from trainer.report.mfu import peak_tflops

    block, batch_size = day.size((1024, 32), (32, 2))
    width, depth, heads = sizes = day.size((768, 12, 12), (32, 1, 2))
    with tempfile.TemporaryDirectory() as folder, contexts() as context:
        data = tokens_file(Path(folder), day.size(20_000_000, 20_000))
        common = (
            *("experiment=text_gpt", "data=tokens", f"data.dataset.path={folder}", "model.size=gpt2"),
            *(f"data.dataset.block_size={block}", f"model.width={width}", f"model.depth={depth}"),
            *("data.dataset.vocab_size=50257", f"model.num_heads={heads}", "train.precision=bf16"),
            *(f"train.global_batch_size={batch_size}", "train.compile=true", "train.max_steps=100000"),
            *("optim.lr=6e-4", "schedule.warmup_steps=2000", "train.epochs=100000"),
        )
        switches = {"Ringmaster": "", "Ringmaster, vocabulary not padded": "model.vocab_multiple=1"}
        switches["Ringmaster, loss in the model"] = "data.task.head=loss"
        switches["Ringmaster, autotuned"] = (
            "train.compile_mode=max-autotune-no-cudagraphs data.task.head=loss"
        )
        if hasattr(F, "linear_cross_entropy"):
            switches["Ringmaster, loss in chunks"] = "data.task.head=chunks"
        ways = {"nanoGPT": nanogpt(day, data, batch_size, block, sizes)}
        for name, switch in day.size(switches, {"Ringmaster": ""}).items():
            ways[name] = steps(context(*common, *switch.split()))
        found = in_turns(day, ways, turns=day.size(8, 1), each=day.size(10, 1))
    peak = peak_tflops(day.device, "bf16")
    # nanoGPT's estimate, after PaLM's appendix B: 6 FLOP for each parameter and token, and attention's
    flop_per_token = 6 * (50304 * width + 12 * depth * width**2) + 12 * depth * width * block
    rows = []
    for name, times in found.items():
        rate = batch_size * block / statistics.median(times) * 1e3
        mfu = f"MFU {rate * flop_per_token / peak / 1e12:.1%}, wanted {MFU_WANTED:.0%}" if peak else "no MFU"
        rows.append(Row(f"GPT-2 124M, {name}", rate, "tokens/s", note=mfu))
    for name, times in found.items():
        if name == "Ringmaster":
            rows.append(day.rated("GPT-2, Ringmaster / nanoGPT", ratio(times, found["nanoGPT"]), "x", 1.0))
        elif name != "nanoGPT":
            rows.append(Row(f"GPT-2, {name} / nanoGPT", ratio(times, found["nanoGPT"]), "x"))
    return rows
