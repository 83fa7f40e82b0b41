"""A trained run in a program: its model, and its predictions for samples at hand, without its data."""

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
    """A trained run, as `trainer.open` returns it.

    Attributes:
        model: with the weights of a checkpoint, on the CPU and in evaluation mode; move it where you like.
        config: the settings of the run.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self.config, self.model = config, model

    @cached_property
    def task(self) -> Task:
        """The task, built as the settings say."""
        return build_task(self.config)

    @torch.no_grad()
    def predict(self, samples: Sequence[Any], batch_size: int = 64) -> dict[str, Tensor]:
        """What the task predicts: tensors by name with a row for each sample, on the CPU.

        `data.eval_transforms`, `data.collate` and `data.images` are applied as in an evaluation, where the
        model is, and in the run's precision.

        Args:
            samples: each as the dataset gives it for an index, or its input alone; with data=imagefolder
                also the path of a picture. A list, a dataset, or a tensor of inputs.

        Raises:
            UserError: the task predicts nothing, or a sample cannot be read or does not fit.
        """
        if not offers(self.task, "predict"):
            raise UserError(
                f"data.task: {type(self.task).__name__} predicts nothing: it has no method predict"
            )
        if isinstance(samples, str | Path) or not hasattr(samples, "__len__"):
            raise UserError(f"predict() takes a list of samples, but was given a {type(samples).__name__}")
        if not len(samples):
            raise UserError("predict() was given no samples")
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
                f"{path} is a path, but {self.config.data.dataset['_target_']} has no method "
                "unlabelled(path) to read it; give samples as the dataset gives them"
            )
        try:
            return read(str(path), **settings)
        except OSError as error:
            raise UserError(on_one_line(error)) from error
