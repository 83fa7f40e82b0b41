"""The state of a run between steps: its progress, and everything else that training changes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.plain_names import (
    buffers_outside,
    every_parameter,
    load_model_state,
    model_state,
    parameter_names,
    plain_name,
)
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.attributes import OptimizerAttributes
from trainer.optim.combined import has_user_part
from trainer.optim.resumed import continue_groups, initial_options
from trainer.optim.schedules import after_evaluation, after_step
from trainer.state.average import MovingAverage
from trainer.state.early_end import EarlyEnd
from trainer.state.progress import Progress
from trainer.tensors.local_shard import inner_tensors, is_dtensor, to_local
from trainer.tensors.nested import mapped


@dataclass
class TrainState:
    """Everything that training changes, except the random generators.

    Names in its state dict are those of the unwrapped module, so that any strategy can load it. Sharded
    tensors, including optimizer state, are DTensors in the state dict, although the optimizer has local
    tensors.
    """

    trainable: TrainableParameters
    optimizer: torch.optim.Optimizer  # of `trainable.own`
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    progress: Progress
    schedule_settings: Mapping[str, Any] = field(default_factory=dict)
    average: MovingAverage | None = None
    early_end: EarlyEnd = field(default_factory=EarlyEnd)
    build: (
        Callable[[TrainableParameters], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]]
        | None
    ) = None
    rates: list[Any] = field(default_factory=list)  # learning rates of the last update, by parameter group

    def __post_init__(self) -> None:
        self._note_settings()

    def _note_settings(self) -> None:
        # A resume compares the settings as built.
        self.settings = {"groups": initial_options(self.optimizer), "schedule": dict(self.schedule_settings)}
        self._attributes = OptimizerAttributes(self.optimizer)

    @property
    def model(self) -> nn.Module:
        """The unwrapped module; its parameters are tensors or, if sharded, DTensors."""
        return self.trainable.model

    @cached_property
    def update_may_draw(self) -> bool:
        """Whether an update may draw random numbers, which torch's own optimizers never do."""
        return has_user_part(self.optimizer)

    def keep_average(self, decay: float, warmup: bool) -> None:
        """Start a moving average of the trainable parameters and of persistent floating-point buffers."""
        trainable = set(self.trainable.whole.values())
        parameters = {name: p for name, p in every_parameter(self.model) if p in trainable}
        persistent = model_state(self.model).keys()
        buffers = {
            plain_name(name): (self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, buffer in self.model.named_buffers()
            if plain_name(name) in persistent
            and buffer.is_floating_point()
            and buffer.itemsize > 1
            # The average of a mask of -inf would be NaN.
            and buffer.isfinite().all()
        }
        self.average = MovingAverage(parameters, buffers, decay, warmup)

    def follow_trainable(self) -> list[str]:
        """Update the state after parameters were frozen or unfrozen; return newly trainable parameters.

        If there are newly trainable parameters, the optimizer and the schedule are built again and continue
        as after a resume. A frozen parameter has no gradient, so the optimizer skips it and keeps its state.
        """
        if new := self.trainable.accept():
            assert self.build is not None
            saved = self.state_dict()
            self.trainable = TrainableParameters(
                self.model, also=self.trainable.whole, owners=self.trainable.owners
            )
            self.optimizer, self.schedule = self.build(self.trainable)
            self._note_settings()
            self._load_optimizer_and_schedule(saved)
            if self.average is not None:
                added = {self.trainable.whole[name] for name in new}
                self.average.add({name: p for name, p in every_parameter(self.model) if p in added})
        return new

    def attach_gradients(self) -> None:
        """Attach the complete, unscaled gradients of a step to the optimizer (a collective in fp16)."""
        self.trainable.attach_gradients()
        self.scaler.unscale_(self.optimizer)  # a fused step would unscale, but see only this rank's overflows

    def count_update(self, is_made: bool) -> None:
        """Record the learning rates of a step, advance the schedule and, if `is_made`, update the average."""
        self.rates = [group["lr"] + 0 for group in self.optimizer.param_groups]  # + 0 copies a tensor
        after_step(self.schedule)
        if is_made:
            self.update_average()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the last update by their names in the log: train/lr[/<group>]."""
        pairs = list(zip(self.optimizer.param_groups, map(float, self.rates), strict=True))
        named = {f"train/lr/{group['name']}": rate for group, rate in pairs if "name" in group}
        return {"train/lr": pairs[0][1], **named}

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of an evaluation, equal on all ranks, to the schedule and to early stopping."""
        after_evaluation(self.schedule, metrics)
        self.early_end.after_evaluation(self.progress.step, metrics)
        self.progress.evaluated_step = self.progress.step

    def update_average(self) -> None:
        """Add the current weights to the average, if there is one."""
        if self.average is not None:
            self.average.update()

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of plain values and live tensors, which are not copied."""
        model = model_state(self.model)
        return {
            "model": model,
            "buffers": buffers_outside(self.model, set(model)),
            "optimizer": self._optimizer_state(),
            "attributes": self._attributes.state_dict(),
            "schedule": self.schedule.state_dict(),
            "settings": self.settings,
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
            "ema": self.average.state_dict() if self.average is not None else {},
            "early_end": self.early_end.state_dict(),
        }

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the live tensors that must be equal on all replicas: parameters, optimizer state, averages.

        For sharded tensors, yield this rank's shard. Buffers are not included, because running statistics
        differ between ranks.
        """
        yield from parameter_names(self.model)
        for name, own in self.trainable.own.items():
            for key, value in self.optimizer.state.get(own, {}).items():
                if isinstance(value, Tensor):
                    inner = inner_tensors(value).items()
                    parts = {f"{key}.{part}": tensor for part, tensor in inner} or {key: value}
                    yield from ((f"{part} of {name}", tensor) for part, tensor in parts.items())
        if self.average is not None:
            yield from ((f"average of {name}", value) for name, value in self.average.named_parameters())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a saved state, whose tensors must be sharded like the current ones."""
        load_model_state(self.model, saved["model"])
        buffers = buffers_outside(self.model, set(saved["model"]))
        with torch.no_grad():
            for name, value in saved.get("buffers", {}).items():  # some may not have been saved
                buffers[name].copy_(value)
        self._load_optimizer_and_schedule(saved)
        # A disabled scaler saves nothing; if it is enabled in this run, it keeps its initial state.
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        for name, value in saved["progress"].items():
            setattr(self.progress, name, value)
        self.early_end.load_state_dict(saved.get("early_end", {}))
        if self.average is not None and saved.get("ema"):
            self.average.load_state_dict(saved["ema"])
        elif self.average is not None:
            self.average.restart()

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state_dict with parameter names in place of their indices.

        torch.distributed.checkpoint.state_dict does this too, but makes an update with zero gradients to find
        the layout, and supports neither SGD without momentum nor parameters that never had a gradient.
        """
        names = self._optimizer_names()
        packed = self.optimizer.state_dict()
        return packed | {  # `packed` may have keys of the optimizer's own state_dict
            # A key that is not an index is the optimizer's own, for state of all parameters.
            "state": {
                (name := names[key] if isinstance(key, int) else key): mapped(
                    state, partial(self._as_saved, name)
                )
                for key, state in packed["state"].items()
            },
            "param_groups": [
                group | {"params": [names[index] for index in group["params"]]}
                for group in packed["param_groups"]
            ],
        }

    def _as_saved(self, name: str, value: Any) -> Any:
        """Return a value of a parameter's state in saved form: dense, as SGD's momentum may be sparse."""
        dense = value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value
        return self.trainable.as_rows(name, dense)

    def _load_optimizer_and_schedule(self, everything: Mapping[str, Any]) -> None:
        optimizer, names, saved = self.optimizer, self._optimizer_names(), everything["optimizer"]
        group_of = {
            name: index for index, group in enumerate(saved["param_groups"]) for name in group["params"]
        }
        # A group with only newly trainable parameters continues the first group.
        known = [
            [group_of[name] for p in group["params"] if (name := self.trainable.names[p]) in group_of]
            for group in optimizer.param_groups
        ]
        earlier = [indices[0] if indices else 0 for indices in known]
        step = everything["progress"]["step"]
        groups = continue_groups(self.schedule, everything, self.settings, step, earlier)
        state = mapped(saved["state"], lambda value: to_local(value) if is_dtensor(value) else value)
        numbers = {name: index for index, name in enumerate(names)}
        packed = optimizer.state_dict()["param_groups"]
        initial = dict(optimizer.state)
        optimizer.load_state_dict(
            saved
            | {
                "state": {numbers.get(name, name): values for name, values in state.items()},
                "param_groups": [
                    group | {"params": own["params"]} for group, own in zip(groups, packed, strict=True)
                ],
            }
        )
        for parameter, initial_state in initial.items():  # Adagrad creates its state in its constructor
            optimizer.state.setdefault(parameter, initial_state)
        # torch casts state to the parameter's dtype, even fp32 moments of bfloat16 weights. An optimizer that
        # overrides the method restores its own dtypes.
        casts = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            loaded = optimizer.state.get(parameter)
            if not isinstance(loaded, dict) or name not in state:
                continue
            for key, value in loaded.items():
                if casts and key != "step":  # the dtype of "step" depends on the kernel
                    value = _to_device(state[name][key], parameter.device)
                loaded[key] = _with_strides_of(parameter, value)
        self._attributes.load_state_dict(everything.get("attributes", {}))

    def _optimizer_names(self) -> list[str]:
        groups = self.optimizer.param_groups
        return [self.trainable.names[parameter] for group in groups for parameter in group["params"]]


def _to_device(saved: Any, device: torch.device) -> Any:
    return mapped(saved, lambda value: value.to(device) if isinstance(value, Tensor) else value)


def _with_strides_of(parameter: Tensor, value: Any) -> Any:
    """Return `value` with the strides of `parameter` if the shapes are equal, as fused steps require.

    Only `train.channels_last`, which concerns 4-D and 5-D tensors, may change the strides on resume.
    Column-major matrices keep their strides, because an optimizer may use them for a square weight.
    """
    is_alike = isinstance(value, Tensor) and value.shape == parameter.shape and not inner_tensors(value)
    is_laid_out = is_dtensor(value) or not is_alike or value.stride() == parameter.stride()
    if is_laid_out or (value.ndim < 4 and not value.is_contiguous()):
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
