"""Generate text with a trained language model: `python -m trainer.sample RUN --prompt TEXT --tokens N`.

Prints the text to standard output as it is generated, and everything else, such as tokens per second at the
end, to standard error. Runs in one process, under torchrun or with launch=local, also with a sharded model.
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
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` stops it without an error
    parser = arguments("trainer.sample", __doc__)
    add, temperature = parser.add_argument, "sampling temperature; 0 selects the likeliest token (default: 1)"
    add("--prompt", default="\n", metavar="TEXT", help="text to continue (default: a new line)")
    add("--tokens", type=int, default=200, metavar="N", help="number of tokens (default: 200)")
    add("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    add("--temperature", type=float, default=1.0, metavar="T", help=temperature)
    add("--top-k", type=int, metavar="K", help="sample only from the K likeliest tokens")
    add("--no-cache", action="store_true", help="disable the key-value cache, for comparison")
    start("trainer.sample", parser, _sample)


def _sample(options: Any, config: Config) -> None:
    import torch  # loaded only after the settings are checked

    from trainer.inference.generate import generate
    from trainer.inference.restore import restored_run

    top_k = 1 if options.top_k is None else options.top_k
    if min(options.tokens, top_k) < 1 or options.temperature < 0:
        raise UserError("--tokens and --top-k must be at least 1, and --temperature at least 0")
    config.train.compile = False  # each length would trigger a recompilation
    with restored_run(config, options.checkpoint) as restored:
        model, tokenizer = restored.module, getattr(restored.train_set(), "tokenizer", None)
        block_size = getattr(model, "block_size", None)
        if tokenizer is None or not isinstance(block_size, int):
            raise UserError(
                f"{config.model['_target_']} with {config.data.dataset['_target_']} cannot generate text: "
                "use a model with the attribute block_size, such as models.gpt.GPT, and a dataset with a "
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
            tokens = _with_heartbeat(tokens, restored.ranks.heartbeat.enter)
            if restored.ranks.is_main:
                _print(tokens, prompt, tokenizer, "with" if use_cache else "without")
            else:
                collections.deque(tokens, maxlen=0)


def _with_heartbeat(tokens: Iterator[int], enter: Callable[[str], None]) -> Iterator[int]:
    for token in tokens:
        enter("evaluate")
        yield token


def _print(tokens: Iterator[int], prompt: Sequence[int], tokenizer: Any, cache: str) -> None:
    """Print the text, holding back incomplete characters, and then the generation speed."""
    start_s, at_s, generated = time.perf_counter(), list[float](), [*prompt]
    text = tokenizer.decode(generated)
    length = len(text)
    print(text, end="", flush=True)
    for token in tokens:
        at_s.append(time.perf_counter() - start_s)
        generated.append(token)
        # Decode the whole text, because a tokenizer may decode a token differently at the start of a text.
        text = tokenizer.decode(generated)
        complete = text.rstrip("\ufffd")  # the next token may complete a character
        print(complete[length:], end="", flush=True)
        length = max(length, len(complete))
    print(text[length:], flush=True)
    rate = f", then {(len(at_s) - 1) / (at_s[-1] - at_s[0]):.1f} tokens/s" if len(at_s) > 1 else ""
    print(
        f"{len(at_s)} tokens {cache} a key-value cache: first token after {at_s[0] * 1e3:.1f} ms{rate}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
