"""The legs of a challenge, next to the uninterrupted run: python docs/pictures/challenge.py [--seed N].

Runs `python -m trainer.exact.challenge`, and draws its output and the step at which each leg resumed.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import style
from matplotlib.figure import Figure

ROOT = style.HERE.parents[1]
LEG = re.compile(r"leg +(\d+): strategy=(\w+(?: comm=\w+)?) on (\d+) to step (\d+), killed: (.*)")
COLOURS = {"ddp": "#4c78a8", "fsdp": "#f2b14a"}
ON_BAR = "#101418"  # dark in both variants


def draw(output: str, starts: Mapping[int, int]) -> Figure:
    """Draw the output of the challenge; `starts` has the step at which each leg resumed."""
    hashes = re.findall(r"^(?:uninterrupted|interrupted) +([0-9a-f]{64})$", output, re.M)
    legs = [
        (int(n), what.replace("comm=", ""), int(ranks), int(to), killed)
        for n, what, ranks, to, killed in LEG.findall(output)
    ]
    last = max(to for *_, to, _ in legs)
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    axes.barh(0, last, color="#59a87a", height=0.7)
    axes.text(4, 0, "uninterrupted: 1 process", va="center", fontsize=13, color=ON_BAR)
    for row, (number, what, ranks, to, killed) in enumerate(legs, 1):
        start = starts[number]
        axes.barh(-row, to - start, left=start, color=COLOURS[what.split()[0]], height=0.7)
        left = start > last / 2
        axes.annotate(
            f"{what} × {ranks}",
            (start if left else to, -row),
            xytext=(-6 if left else 12, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=13,
        )
        if killed != "none":
            axes.plot(to, -row, "x", color="#e45756", markersize=11, markeredgewidth=3)
    for row, sha in ((0, hashes[0]), (-len(legs), hashes[1])):
        axes.text(
            last + 5, row, f"{sha[:8]}…", va="center", family="monospace", fontsize=13, fontweight="bold"
        )
    axes.set_xlim(0, last * 1.31)
    axes.set_xticks(range(0, last + 1, 100))
    axes.set_ylim(-len(legs) - 0.5, 0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return figure


if __name__ == "__main__":
    style.use()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer.exact.challenge", "--folder", folder, *sys.argv[1:]]
        output = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
        print(output)
        starts = {}
        for log in Path(folder).glob("leg*.log"):
            resumed = re.search(r"at step (\d+)", log.read_text())
            starts[int(log.name[3 : log.name.index(".")])] = int(resumed[1]) if resumed else 0
    style.save(draw(output, starts), "challenge")
