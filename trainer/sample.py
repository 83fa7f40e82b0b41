"""Continues a text with a trained language model: `python -m trainer.sample RUN --prompt TEXT --tokens N`.

The text is printed to standard output as it is generated, all else to standard error; at the end the
tokens per second. Runs alone, under torchrun or with launch=local, also if the model is sharded.
"""

import collections
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.config import Config
from trainer.errors import UserError
from trainer.inference.command import arguments, start


def main() -> None:
    """Run the command line `sys.argv`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    parser = arguments("trainer.sample", __doc__)
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="default: a new line")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many; default: 200")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws; default: 0")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: the likeliest; default: 1"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw only from the K likeliest")
    parser.add_argument("--no-cache", action="store_true", help="recompute all for each token, to compare")
    start("trainer.sample", parser, _sample)


def _sample(options: Any, config: Config) -> None:
    import torch  # loaded only after the settings are checked

    from trainer.inference.generate import generate
    from trainer.inference.restore import restored_run

    top_k = 1 if options.top_k is None else options.top_k
    if min(options.tokens, top_k) < 1 or options.temperature < 0:
        raise UserError("--tokens and --top-k must be at least 1, and --temperature at least 0")
    config.train.compile = False  # each length would be compiled separately
    with restored_run(config, options.checkpoint) as restored:
        model, tokenizer = restored.module, getattr(restored.train_set(), "tokenizer", None)
        block_size = getattr(model, "block_size", None)
        if tokenizer is None or not isinstance(block_size, int):
            raise UserError(
                f"{config.model['_target_']} on {config.data.dataset['_target_']} is not a text model: "
                "sampling needs a model with a block_size, such as models.gpt.GPT, and data with a "
                "tokenizer, such as trainer.data.text.in_memory.Text"
            )
        prompt = tokenizer.encode([os.fsencode(options.prompt)])[0].tolist()
        if not 0 < len(prompt) <= block_size:
            raise UserError(
                f"--prompt has {len(prompt)} tokens, but must have 1 to {block_size}, the model's block_size"
            )
        use_cache = (
            not options.no_cache and hasattr(model, "empty_cache") and getattr(model, "border", None) is None
        )
        tokens = generate(
            model,
            prompt,
            options.tokens,
            block_size=block_size,
            vocab_size=tokenizer.vocab_size,
            device=restored.ranks.device,
            generator=torch.Generator().manual_seed(options.seed),
            temperature=options.temperature,
            top_k=options.top_k,
            use_cache=use_cache,
        )
        with restored.strategy.autocast():
            tokens = _in_time(tokens, restored.ranks.heartbeat.enter)
            if restored.ranks.is_main:
                _print(tokens, prompt, tokenizer, "with" if use_cache else "without")
            else:
                collections.deque(tokens, maxlen=0)


def _in_time(tokens: Iterator[int], enter: Callable[[str], None]) -> Iterator[int]:
    """`tokens`; each updates this rank's heartbeat."""
    for token in tokens:
        enter("evaluate")
        yield token


def _print(tokens: Iterator[int], prompt: Sequence[int], tokenizer: Any, cache: str) -> None:
    """Print the text as far as its characters are complete, and then the rate."""
    began, at_s, so_far = time.perf_counter(), list[float](), [*prompt]
    text = tokenizer.decode(so_far)
    length = len(text)
    print(text, end="", flush=True)
    for token in tokens:
        at_s.append(time.perf_counter() - began)
        so_far.append(token)
        # The whole text, since a tokenizer may write a token differently at the beginning of a text.
        text = tokenizer.decode(so_far)
        whole = text.rstrip("\ufffd")  # the next token may complete a character
        print(whole[length:], end="", flush=True)
        length = max(length, len(whole))
    print(text[length:], flush=True)
    rate = f", {(len(at_s) - 1) / (at_s[-1] - at_s[0]):.1f} tokens/s from then on" if len(at_s) > 1 else ""
    print(
        f"{len(at_s)} tokens {cache} a key-value cache: the first after {at_s[0] * 1e3:.1f} ms{rate}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
