"""How far the loss is from that of one process: PYTHONPATH=. python docs/pictures/same_bits.py.

Without train.exact on 2, 3 and 4 ranks, and with it on 8, 5, 3 and 8 ranks, killed in between.
"""

import json
import tempfile
from pathlib import Path

import style
from matplotlib.figure import Figure

from benchmarks.same_bits import EXACT, SCHEDULE, run, schedule

_ZERO = 1e-10  # where a difference of 0 is drawn


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def draw(folder: Path) -> Figure:
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for exact in ((), EXACT):
        run(folder / f"alone{len(exact)}", "mlp", "single", 1, *exact)
    for ranks, line in ((2, ":"), (3, "--"), (4, "-")):
        run(folder / str(ranks), "mlp", "ddp", ranks)
        gaps = differences(folder / str(ranks), folder / "alone0")
        axes.plot(gaps.keys(), gaps.values(), line, color="#4c78a8", label=f"{ranks} ranks")
    schedule(folder / "schedule")
    gaps = differences(folder / "schedule", folder / "alone1")
    axes.plot(
        gaps.keys(), gaps.values(), color="#1a7f37", linewidth=4, label="8, 5, 3, 8 ranks, train.exact=8"
    )
    begin = 0
    for strategy, ranks, last in SCHEDULE:
        middle = (begin + last) / 2
        axes.text(middle, _ZERO / 2, f"{strategy} on {ranks}", ha="center", va="top", color="#1a7f37")
        begin = last
    axes.set_yscale("log")
    axes.set_ylim(bottom=_ZERO / 30)  # below the line, where no curve is
    axes.set_yticks([_ZERO, 1e-8, 1e-6, 1e-4], ["0", "1e-8", "1e-6", "1e-4"])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.set_title("loss, difference from that of one process", loc="left")
    axes.legend(loc="upper left", ncols=2)
    return figure


def differences(run_dir: Path, alone: Path) -> dict[int, float]:
    of_one = losses(alone)
    return {step: abs(loss - of_one[step]) or _ZERO for step, loss in losses(run_dir).items()}


if __name__ == "__main__":
    style.use()
    with tempfile.TemporaryDirectory() as folder:
        style.save(draw(Path(folder)), "same-bits")
