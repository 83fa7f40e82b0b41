"""What a rank of each strategy holds at the peak of a step: python docs/pictures/memory.py.

The model is GPT-2 XL on 64 ranks, as docs/howto/memory-and-fsdp.md has it.
"""

import contextlib
import io
import json

import style
from matplotlib.figure import Figure

from planner.memory import STRATEGIES, main

ARGUMENTS = (
    "experiment=text_gpt model.size=gpt2-xl model.vocab_size=50304 data.dataset.block_size=1024 "
    "train.precision=bf16 train.global_batch_size=512 --world 64 --json"
)
SHOWN = ["single", "ddp", "fsdp", "hybrid"]
COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#e45756",
    "optimizer": "#f2b14a",
    "communication": "#8e6bbf",
    "activations": "#59a87a",
}

if __name__ == "__main__":
    found = {}
    for name in SHOWN:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([*ARGUMENTS.split(), *STRATEGIES[name]])
        found[name] = json.loads(printed.getvalue())[STRATEGIES[name][0].partition("=")[2]]
    style.use()
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="GB of a rank at the peak of a step")
    left = [0.0] * len(SHOWN)
    for kind, colour in COLOURS.items():
        widths = [found[strategy]["parts"][kind] / 1e9 for strategy in SHOWN]
        axes.barh(SHOWN, widths, left=left, color=colour, label=kind, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for strategy, end in zip(SHOWN, left, strict=True):
        axes.annotate(
            f"{end:.0f} GB", (end, strategy), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.axvline(80, color="#e45756", linestyle="--", linewidth=1.5)
    axes.text(79, len(SHOWN) - 1.5, "a GPU of 80 GB", ha="right", color="#e45756")
    axes.set_xlim(0, 84)
    axes.invert_yaxis()
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=3)
    style.save(figure, "memory")
