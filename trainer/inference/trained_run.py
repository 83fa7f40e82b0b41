"""A trained run for use in a program: its model, and predictions for given samples."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class
from torch import Tensor, nn

from trainer.build.data import build_collate, build_to_device
from trainer.build.task import build_task
from trainer.config import Config
from trainer.config.instantiate import instantiate
from trainer.data.loading.reader import collated
from trainer.errors import UserError, on_one_line
from trainer.evaluation import evaluation_mode
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.tasks import Task, offers


class TrainedRun:
    """A trained run, as returned by `trainer.open`.

    Attributes:
        model: the model with the weights of a checkpoint, on the CPU and in evaluation mode; may be moved.
        config: the settings of the run.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self.config, self.model = config, model

    @cached_property
    def task(self) -> Task:
        """The task, built from the settings."""
        return build_task(self.config)

    @torch.no_grad()
    def predict(self, samples: Sequence[Any], batch_size: int = 64) -> dict[str, Tensor]:
        """Return the task's predictions: tensors by name with a row for each sample, on the CPU.

        Samples are processed as in an evaluation (`data.eval_transforms`, `data.collate`, `data.images`),
        in the run's precision and on the device of the model.

        Args:
            samples: a list, a dataset, or a tensor of inputs. Each sample is what the dataset returns for an
                index, or only its input; with data=imagefolder it may be the path of an image.
            batch_size: samples per forward pass.

        Raises:
            UserError: if the task has no method `predict`, or a sample cannot be read or collated.
        """
        if not offers(self.task, "predict"):
            raise UserError(
                f"data.task={type(self.task).__name__} cannot make predictions, because it has no `predict` "
                "method (see trainer.tasks.Task)"
            )
        if isinstance(samples, str | Path) or not hasattr(samples, "__len__"):
            raise UserError(f"predict() expects a list of samples, but got a {type(samples).__name__}")
        if not len(samples):
            raise UserError("predict() expects at least one sample, but got none")
        data, device = self.config.data, next(self.model.parameters()).device
        to_device, collate = build_to_device(self.config, device), build_collate(data)
        strategy = Strategy(device, ComputeOptions(self.config.train.precision))
        parts: list[dict[str, Tensor]] = []
        with evaluation_mode(self.model), strategy.autocast():
            for first in range(0, len(samples), batch_size):
                numbers = range(first, min(first + batch_size, len(samples)))
                batch = collated([self._prepared(samples[at]) for at in numbers], self, numbers, collate)
                parts.append(self.task.predict(self.model, to_device(batch)))
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}

    def _prepared(self, sample: Any) -> Any:
        if isinstance(sample, str | Path):
            sample = self._read(sample)
        return self._transform(sample)

    @cached_property
    def _transform(self) -> Any:
        if not (nodes := self.config.data.eval_transforms):
            return lambda sample: sample
        from torchvision.transforms import v2

        return v2.Compose([instantiate("data.eval_transforms", node) for node in nodes])

    def _read(self, path: str | Path) -> Any:
        settings = dict(self.config.data.dataset)
        read = getattr(get_class(settings.pop("_target_")), "unlabelled", None)
        if read is None:
            raise UserError(
                f"{path} is a path, but {self.config.data.dataset['_target_']} has no `unlabelled(path)` "
                "method to read it; pass samples as the dataset returns them"
            )
        try:
            return read(str(path), **settings)
        except OSError as error:
            raise UserError(on_one_line(error)) from error
