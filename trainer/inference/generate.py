"""Generate text with a language model, token by token."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    block_size: int,
    vocab_size: int,
    device: torch.device,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, each drawn from the model's prediction.

    When the context exceeds `block_size` tokens, it is truncated to its last half, so that a cache is
    recomputed once per half block instead of for each token.

    Args:
        model: maps tokens (1, T) to logits (1, T, vocabulary); in evaluation mode.
        prompt: from 1 to block_size tokens.
        block_size: the context length of the model, in tokens.
        vocab_size: size of the tokenizer's vocabulary; the model's may be larger, such as a multiple of 64.
        generator: a CPU generator; a seed gives the same tokens on every device, except for rounding.
        temperature: divides the logits; values below 1 favor likely tokens, and 0 selects the likeliest.
        top_k: draw only from this number of the likeliest tokens; None: from all tokens.
        use_cache: use a key-value cache, from the model's `empty_cache()` (see models.gpt).
    """
    assert 0 < len(prompt) <= block_size
    window, cached = list(prompt), 0
    cache: Any = model.empty_cache() if use_cache else None  # type: ignore[operator]
    for _ in range(num_tokens):
        if len(window) > block_size:
            window, cached = window[-max(1, block_size // 2) :], 0
            cache = model.empty_cache() if use_cache else None  # type: ignore[operator]
        tokens = torch.tensor([window[cached:]], device=device)
        logits = model(tokens, cache) if use_cache else model(tokens)
        cached = len(window) if use_cache else 0
        token = draw(logits[0, -1, :vocab_size], temperature, top_k, generator)
        window.append(token)
        yield token


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token from the logits (vocabulary,)."""
    scores = logits.cpu().double()
    if temperature == 0:
        return int(scores.argmax())
    if top_k is not None and top_k < len(scores):
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    probabilities = ((scores - scores.max()) / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
