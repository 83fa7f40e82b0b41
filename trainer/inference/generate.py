"""Text from a model, token by token."""

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

    A model whose context is `block_size` tokens gets, once they are that many, the last half of
    them and what follows: a cache is then recomputed once, not at each token.

    Args:
        model: tokens (1, T) -> logits (1, T, vocabulary); in evaluation mode.
        prompt: 1 to block_size tokens.
        vocab_size: of the tokenizer; the model's may be larger, to reach a multiple of 64.
        generator: of the CPU; the same seed gives the same tokens on every device, except for rounding.
        temperature: below 1 likely tokens become likelier; 0 takes the likeliest.
        top_k: draw from this many of the likeliest; None: from all.
        use_cache: with the model's `empty_cache()`, as in models.gpt.
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
    """Draw a token from its logits (vocabulary,)."""
    scores = logits.double().cpu()
    if temperature == 0:
        return int(scores.argmax())
    if top_k is not None and top_k < len(scores):
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    probabilities = ((scores - scores.max()) / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
