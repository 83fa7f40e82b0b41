"""Run two steps of a run on fake tensors, as one of its ranks, to estimate the memory use of that rank.

The model, the strategy, the loss and the optimizer are those of the run. The tensors are fake (they have
shapes and dtypes, but no data), and so are the other ranks. Nothing is computed.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.ledger import MemoryLedger
from planner.pretend import DryRunWorld, FusedAttention, as_rank_of, repeated, without_values
from planner.simulated import PlacedStrategy, simulated_strategy
from trainer.build.data import build_dataset, build_to_device, first_batch
from trainer.build.model import initial_model, wrap_model
from trainer.build.task import build_task
from trainer.config import Config, DdpConfig, FsdpConfig, NativeCommConfig
from trainer.errors import UserError, first_line
from trainer.exact.shard_sums import own_parameters, units_of
from trainer.forward_backward import forward_backward
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.optimizers import sparse_weights
from trainer.optim.param_groups import build_optimizer
from trainer.optim.schedules import constant
from trainer.state.train_state import Progress, TrainState
from trainer.strategies.base import grad_scaler, parameter_count
from trainer.tasks import offers
from trainer.tasks.base import call_begin_step
from trainer.tensors.local_shard import to_local
from trainer.torch_private import fake_tensor_mode

STATE = ("parameters", "optimizer", "averages")


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank's tensors, in bytes.

    Attributes:
        start: the peak while the model is built, initialised and sharded.
        peak: the peak of a step, on the device.
        parts: the bytes at the peak, by kind of tensor.
        host: the peak in host memory, with strategy.cpu_offload.
    """

    start: int
    peak: int
    parts: dict[str, int]
    host: int = 0


class DryRun:
    """The model and the data of a run, for simulated steps with any strategy and batch size.

    Raises:
        UserError: if the run would raise it, or if the dataset is a stream without samples.
    """

    def __init__(self, config: Config) -> None:
        self.task = build_task(config)
        train_set = build_dataset(config.data, "train")
        self._model = lambda config: initial_model(config, train_set, on_meta=True)
        self.to_device = lambda device: build_to_device(config, device, train_set)
        self.samples = first_batch(config, train_set, 1), first_batch(config, train_set, 2)
        model = self._model(config).module
        self.num_parameters = parameter_count(model.parameters())

    @contextmanager
    def under(self, config: Config, world: DryRunWorld) -> Iterator["Stage"]:
        """Build the model, strategy and optimizer of `config`, which must have the same model and data.

        Raises:
            UserError: as in the run.
        """
        train = dataclasses.replace(config.train, compile=False)
        config = dataclasses.replace(config, train=train, comm=NativeCommConfig("native", "fp32", False))
        if train.exact is not None and isinstance(config.strategy, FsdpConfig):
            config.strategy = dataclasses.replace(config.strategy, reduce_every_micro_batch=True)
        model = self._model(config)
        with as_rank_of(world) as ranks:
            placed = simulated_strategy(config, ranks, world.per_host)
            to_device = self.to_device(placed.device)
            fake_model = without_values(model, placed)
            fakes = fake_tensor_mode()
            # torch warns about outputs that are views; with fake tensors, there are more of them.
            quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
            with quiet, fakes, FusedAttention(), MemoryLedger() as ledger:
                module = wrap_model(config, fake_model, placed.strategy)
                yield Stage(config, self, placed, to_device, module, ledger)


class Stage:
    """Runs steps of a dry run. The first step runs twice, to create the optimizer's state."""

    def __init__(
        self,
        config: Config,
        dry_run: DryRun,
        placed: PlacedStrategy,
        to_device: Any,
        module: nn.Module,
        ledger: MemoryLedger,
    ) -> None:
        self._config, self._dry_run, self._ledger = config, dry_run, ledger
        self._strategy, self._devices = placed.strategy, placed.devices
        self._module, self._to_device = module, to_device
        self._plain = self._strategy.unwrap(module)
        ledger.name("parameters", [*module.parameters(), *module.buffers()])
        self._buckets = _ddp_buckets(config, module)
        ledger.name("gradients", self._buckets.values())
        trainable = TrainableParameters(self._plain)
        optimizer = build_optimizer(trainable, config.optim)
        scaler = grad_scaler(self._strategy)
        self._state = TrainState(trainable, optimizer, constant(optimizer), scaler, Progress())
        if config.ema.decay is not None:
            self._state.keep_average(config.ema.decay, config.ema.warmup)
            assert self._state.average is not None
            ledger.name("averages", self._state.average.state_dict()["weights"].values())
        self._starts = {name: ledger.accounts[device].peak_bytes for name, device in self._devices.items()}
        self._offloads = isinstance(config.strategy, FsdpConfig) and config.strategy.cpu_offload
        self._has_state = False

    @property
    def num_replicas(self) -> int:
        return self._strategy.num_replicas

    @property
    def trains(self) -> bool:
        return self._strategy.replica < self._strategy.num_replicas

    def footprint(self, micro_batch_size: int, accumulation: int) -> Footprint:
        return max(self.footprints(micro_batch_size, accumulation).values(), key=lambda one: one.peak)

    def footprints(self, micro_batch_size: int, accumulation: int) -> dict[str, Footprint]:
        """Return the memory of a step on each of the rank's devices, by device name.

        Raises:
            UserError: the model reads values of tensors, which fake tensors do not have.
        """
        batch = repeated(*self._dry_run.samples, micro_batch_size)
        for _ in range(1 if self._has_state else 2):
            self._ledger.forget_peaks()
            self._step(batch, min(accumulation, 2))
            self._has_state = True
        return {name: self._on(name, device, accumulation) for name, device in self._devices.items()}

    def _integers(self, device: torch.device, accumulation: int) -> int:
        """Return the bytes of the integer sums and messages that train.exact needs."""
        trainable = [p for p in self._module.parameters() if p.requires_grad]
        own = sum(to_local(p).numel() for p in trainable if to_local(p).device == device)
        sums, messages = own * (accumulation > 1), 0
        if self.num_replicas > 1 and isinstance(self._config.strategy, FsdpConfig):
            units = [own_parameters(unit) for _, unit in units_of(self._module)]
            sums = own
            messages = max(sum(getattr(part, name).numel() for part, name in unit) for unit in units)
        elif self.num_replicas > 1:
            messages = own
        return torch.int64.itemsize * (sums + messages)

    def _on(self, name: str, device: torch.device, accumulation: int) -> Footprint:
        account = self._ledger.accounts[device]
        parts, host = account.peak(), 0
        if self._config.train.exact is not None:
            parts["communication"] += self._integers(device, accumulation)
        state = sum(parts[kind] for kind in STATE)  # always in memory, so it is part of every peak
        if self._offloads:
            host = state
            parts |= dict.fromkeys(STATE, 0)
        return Footprint(self._starts[name], sum(parts.values()), parts, host)

    def _step(self, batch: Any, accumulation: int) -> None:
        """Run a step like trainer/step.py, but without logging or communication outside the strategy."""
        module, strategy, state = self._module, self._strategy, self._state
        settings = self._config.strategy
        if isinstance(settings, DdpConfig) and settings.gradient_as_bucket_view:
            for parameter, bucket in self._buckets.items():
                parameter.grad = bucket
        module.train()
        if offers(self._dry_run.task, "begin_step"):
            call_begin_step(self._dry_run.task, 1, 1, self._plain)

        def scaled(loss: Tensor, _: Any) -> Tensor:
            return state.scaler.scale(loss / accumulation)

        try:
            for micro_step in range(accumulation if self.trains else 0):
                is_last, task = micro_step == accumulation - 1, self._dry_run.task
                forward_backward(strategy, task, module, self._to_device(batch), scaled, is_last=is_last)
        except (RuntimeError, ValueError) as error:  # torch raises these for operators without fake results
            reason = first_line(error)
            raise UserError(
                f"the model's memory use cannot be estimated with fake tensors: {reason}"
            ) from error
        self._name_gradients(module)
        strategy.aggregate(module)
        self._name_gradients(self._plain)
        state.trainable.attach_gradients()
        if self._config.train.clip_grad_norm is not None:
            strategy.grad_norm(state.trainable)
        state.optimizer.step()
        states = [value for each in state.optimizer.state.values() for value in each.values()]
        self._ledger.name("optimizer", [value for value in states if isinstance(value, Tensor)])
        state.update_average()
        state.trainable.drop_gradients()

    def _name_gradients(self, module: nn.Module) -> None:
        self._ledger.name("gradients", [p.grad for p in module.parameters() if p.grad is not None])


def _ddp_buckets(config: Config, module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return DDP's buckets by parameter; they exist for the whole run. Sparse gradients have no buckets."""
    if not isinstance(config.strategy, DdpConfig):
        return {}
    sparse = sparse_weights(module)
    return {p: torch.empty_like(p) for p in module.parameters() if p.requires_grad and p not in sparse}
