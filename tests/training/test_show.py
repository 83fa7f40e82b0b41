"""A task shows samples as often as configured, from the averaged weights if there are any."""

from pathlib import Path
from typing import Any

from torch import nn

from tests.ranks import run_ranks
from tests.runs import context_of
from trainer.tasks import Classification, Evaluation, Shown


class Shows(Classification):
    """Records the sum of the first weight at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        self.seen.append(next(model.parameters()).sum().item())
        return Shown()


def shown(folder: Path, *overrides: str) -> list[Any]:
    from trainer.loop import fit

    task = ("data=own", "data.dataset._target_=trainer.data.digits.Digits")
    task += ("data.task._target_=tests.training.test_show.Shows", "model.hidden=[8]", "train.epochs=5")
    task += ("train.global_batch_size=512", "checkpoint.every_epochs=null")
    with context_of(*task, "logger=jsonl", "train.show_every=2", *overrides, f"run_dir={folder}") as context:
        fit(context)
        weight, average = next(context.state.model.parameters()), context.state.average
        plain = weight.sum().item()
        if average is not None:
            with average.in_place():
                plain = weight.sum().item()
        return [len(context.task.seen), context.task.seen[-1] == plain]  # type: ignore[attr-defined]


def each_shown(folder: Path) -> list[list[Any]]:
    averages = ((), ("ema.decay=0.9",), ("ema.decay=0.9", "ema.evaluate=ema"))
    return [shown(folder / str(number), *words) for number, words in enumerate(averages)]


def test_every_second_evaluation_and_the_last_are_shown(tmp_path: Path) -> None:
    assert run_ranks(each_shown, 1, tmp_path, init=False) == [[[3, True]] * 3]
