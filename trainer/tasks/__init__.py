"""Tasks: classes that define the loss, the metrics, and what TensorBoard shows."""

from trainer.tasks.base import Evaluation, Shown, Task, offers
from trainer.tasks.classification import Classification
from trainer.tasks.language import LanguageModelling
from trainer.tasks.multi_label import MultiLabel
from trainer.tasks.own_loss import OwnLoss
from trainer.tasks.regression import Regression

__all__ = [
    "Classification",
    "Evaluation",
    "LanguageModelling",
    "MultiLabel",
    "OwnLoss",
    "Regression",
    "Shown",
    "Task",
    "offers",
]
