"""Build the task, and check that it has the required methods."""

from typing import Any

from trainer.config import Config
from trainer.config.instantiate import instantiate
from trainer.errors import UserError
from trainer.tasks import Task, offers
from trainer.tasks.base import refuse_own_parameters


def build_task(config: Config) -> Task:
    """Build the configured task. Raise UserError if it lacks a method, or has trainable parameters."""
    task: Task = instantiate("data.task", config.data.task)
    if missing := _missing_methods(task, config.train.evaluates):
        raise UserError(
            f"data.task: {config.data.task['_target_']} returned a {type(task).__name__} without {missing}; "
            "see trainer.tasks.Task. With train.eval_every_epochs=0, only loss is needed"
        )
    refuse_own_parameters(task)
    if config.train.compile and offers(task, "compile"):
        task.compile()
    return task


def _missing_methods(task: Any, evaluates: bool) -> str:
    missing = [] if offers(task, "loss") else ["loss"]
    if evaluates:
        pair = ("rows", "summarise_rows") if offers(task, "rows") else ("eval_sums", "summarise")
        missing += [name for name in pair if not offers(task, name)]
        if {*pair} <= {*missing}:
            missing.append("(or rows and summarise_rows)")
    return " and ".join(missing).replace(" and (", " (")
