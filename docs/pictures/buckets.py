"""A backward pass and its buckets on a time axis, from a real run: python docs/pictures/buckets.py."""

import os
import tempfile
from typing import Any

import style
from matplotlib.figure import Figure

import trainer
from trainer.loggers import Logger


class Picture(Logger):
    """Saves the plot that the run draws at its end."""

    def __init__(self, **told: Any) -> None:
        style.use()

    def figure(self, name: str, figure: Figure, step: int) -> None:
        axes = figure.axes[0]
        axes.set_title("")
        labels = [label.get_text() for label in axes.get_yticklabels()]
        end = max(bar.get_x() for bar in axes.patches[: len(labels)])  # the last bucket is ready
        axes.barh(-1, end, color="#59a87a")
        axes.set_yticks(range(-1, len(labels)), ["backward pass", *labels])
        axes.set_ylim(len(labels) - 0.4, -1.6)
        style.save(figure, "buckets")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(style.HERE)  # for the ranks
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(
            [
                "experiment=text_gpt",
                "comm=ring",
                "strategy.bucket_cap_mb=3",
                "model.width=256",
                "model.depth=6",
                "train.global_batch_size=8",
                "train.max_steps=30",
                "train.eval_every_epochs=0",
                "+logger.picture._target_=buckets.Picture",
                f"run_dir={folder}/run",
            ],
            processes=2,
        )
