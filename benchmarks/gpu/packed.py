"""Compare FlashAttention with an attention mask on packed documents of GPT-2: time and difference."""

from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.day import Day, Row, in_turns, ratio
from models.gpt import GPT
from models.packed import takes_varlen

WAYS = {"FlashAttention": takes_varlen, "the mask": lambda *_: False}


def measure(day: Day) -> Iterator[Row]:
    block, batch, a_document = day.size((1024, 16, 300), (32, 2, 5))
    sizes = day.size((768, 12, 12), (32, 1, 2))
    torch.manual_seed(0)
    model = GPT(day.size(50257, 50), block, "gpt2", *sizes, vocab_multiple=64, border=0).to(day.device)
    tokens = torch.randint(1, model.vocab_size, (batch, block), device=day.device)
    tokens[torch.rand(batch, block, device=day.device) < 1 / a_document] = 0

    def loss(way: str, dtype: torch.dtype) -> Tensor:
        model.zero_grad()
        with mock.patch("models.gpt.takes_varlen", WAYS[way]), torch.autocast(day.device.type, dtype):
            found: Tensor = model(tokens, targets=tokens.roll(-1, 1))
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    def steps(way: str) -> Iterator[None]:
        while True:
            loss(way, torch.bfloat16)
            yield

    apart = []
    for way in WAYS:
        value = loss(way, torch.float16)
        apart.append((value, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (flash, flash_gradient), (mask, gradient) = apart
    off = abs(flash - mask).item()
    yield Row("packed, losses apart", off, "", "<= 1e-3", off <= 1e-3 if day.on_gpu else None)
    off = ((flash_gradient - gradient).norm() / gradient.norm()).item()
    yield Row("packed, gradients apart", off, "of the norm", "<= 1e-2", off <= 1e-2 if day.on_gpu else None)
    found = in_turns(day, {way: steps(way) for way in WAYS}, *day.size((8, 10), (1, 1)))
    note = f"{int((tokens == 0).sum())} borders in {batch} x {block} tokens"
    speed = ratio(found["FlashAttention"], found["the mask"])
    yield day.rated(
        "packed, FlashAttention / the mask", speed, "x", 1.0, note if day.on_gpu else "the mask twice"
    )
