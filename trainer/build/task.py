"""Builds the task, and refuses one that lacks a method."""

from typing import Any

from trainer.config import Config
from trainer.config.instantiate import instantiate
from trainer.errors import UserError
from trainer.tasks import Task, offers
from trainer.tasks.base import refuse_own_parameters


def build_task(config: Config) -> Task:
    task: Task = instantiate("data.task", config.data.task)
    if lacking := _lacking(task, config.train.evaluates):
        raise UserError(
            f"data.task: {config.data.task['_target_']} makes a {type(task).__name__} without {lacking}; see "
            "trainer.tasks.Task. With train.eval_every_epochs=0 only loss is needed"
        )
    refuse_own_parameters(task)
    if config.train.compile and offers(task, "compile"):
        task.compile()
    return task


def _lacking(task: Any, evaluates: bool) -> str:
    """The methods that `task` should have and does not, in words."""
    lacking = [] if offers(task, "loss") else ["loss"]
    if evaluates:
        pair = ("rows", "summarise_rows") if offers(task, "rows") else ("eval_sums", "summarise")
        lacking += [name for name in pair if not offers(task, name)]
        if {*pair} <= {*lacking}:
            lacking.append("(or rows and summarise_rows)")
    return " and ".join(lacking).replace(" and (", " (")
