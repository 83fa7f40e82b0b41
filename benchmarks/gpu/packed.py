"""Compare FlashAttention with an attention mask for GPT-2 on packed documents: speed and difference."""

from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.day import Day, Row, in_turns, ratio
from models.gpt import GPT
from models.packed import takes_varlen

KERNELS = {"FlashAttention": takes_varlen, "the mask": lambda *_: False}


def measure(day: Day) -> Iterator[Row]:
    block, batch, document_length = day.size((1024, 16, 300), (32, 2, 5))
    sizes = day.size((768, 12, 12), (32, 1, 2))
    torch.manual_seed(0)
    model = GPT(day.size(50257, 50), block, "gpt2", *sizes, vocab_multiple=64, border=0).to(day.device)
    tokens = torch.randint(1, model.vocab_size, (batch, block), device=day.device)
    tokens[torch.rand(batch, block, device=day.device) < 1 / document_length] = 0

    def loss(way: str, dtype: torch.dtype) -> Tensor:
        model.zero_grad()
        with mock.patch("models.gpt.takes_varlen", KERNELS[way]), torch.autocast(day.device.type, dtype):
            found: Tensor = model(tokens, targets=tokens.roll(-1, 1))
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    def steps(way: str) -> Iterator[None]:
        while True:
            loss(way, torch.bfloat16)
            yield

    results = []
    for way in KERNELS:
        value = loss(way, torch.float16)
        results.append(
            (value, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    (flash, flash_gradient), (mask, gradient) = results
    difference = abs(flash - mask).item()
    yield Row(
        "packed, difference of losses", difference, "", "<= 1e-3", difference <= 1e-3 if day.on_gpu else None
    )
    difference = ((flash_gradient - gradient).norm() / gradient.norm()).item()
    yield Row(
        "packed, difference of gradients",
        difference,
        "of the norm",
        "<= 1e-2",
        difference <= 1e-2 if day.on_gpu else None,
    )
    found = in_turns(day, {way: steps(way) for way in KERNELS}, *day.size((8, 10), (1, 1)))
    note = f"{int((tokens == 0).sum())} borders in {batch} x {block} tokens"
    speed = ratio(found["FlashAttention"], found["the mask"])
    yield day.rated(
        "packed, FlashAttention / the mask", speed, "x", 1.0, note if day.on_gpu else "the mask twice"
    )
