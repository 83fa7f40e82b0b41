"""FSDP2: shards parameters, gradients and optimizer state over the ranks, and gathers one unit at a time."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trainer.config import FsdpConfig
from trainer.distributed.backend_flags import DTYPES, return_large_blocks
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.exact.shard_sums import add_by_chunks
from trainer.state.train_state import TrainState
from trainer.strategies.base import ComputeOptions, Fill, Phase, Strategy
from trainer.strategies.sharding import (
    StaleReferenceCheck,
    batch_norms,
    explained,
    holders_of,
    is_self_contained,
    refuse_unshardable,
    sharding_mesh,
)
from trainer.strategies.units import named_units, units_by_size
from trainer.tensors.local_shard import is_dtensor


class Fsdp(Strategy):
    name = "fsdp"
    uses = "same"
    gradients_differ = True
    fills_by_unit = True
    incomplete_reason = "each rank has only a shard"

    def __init__(self, settings: FsdpConfig, ranks: Ranks, compute: ComputeOptions) -> None:
        super().__init__(ranks.device, compute)
        return_large_blocks(ranks.device)
        self.settings = settings
        self._used: UsedParameters | None = None
        self._gathers_model = False  # for an evaluation
        self.num_replicas, self.replica = ranks.world_size, ranks.rank
        self.mesh = sharding_mesh(settings.shard_group, ranks)
        if settings.cpu_offload and ranks.device.type == "cpu":
            raise UserError("strategy.cpu_offload=true needs a GPU; set strategy.cpu_offload=false on CPUs")
        if settings.find_unused_parameters:
            if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                raise UserError(
                    "strategy.find_unused_parameters=true under fsdp needs torch>=2.14, but this is torch "
                    f"{torch.__version__}; upgrade torch, or use strategy=ddp"
                )
            self.uses = "any"
        if self.mesh.ndim == 2:
            replicate, shard = self.mesh.shape
            self.notes.append(f"fsdp: hybrid, {replicate} replicas, each sharded over {shard} ranks")

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        # A batch norm's weight must be fp32 as its running statistics are; its input is not cast.
        in_fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
        norms = batch_norms(model) if self.param_dtype != torch.float32 else []
        units = self._units(model, norms)
        refuse_unshardable(model, [*norms, *units])
        shard = functools.partial(
            fully_shard,
            mesh=self.mesh,
            reshard_after_forward=self.settings.reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy(),
        )
        # Fill each unit just before it is sharded, so that no more than one unit is unsharded at a time.
        stale_check = StaleReferenceCheck(model)
        for norm in norms:
            fill(norm)
            stale_check.note(norm)
            shard(norm, mp_policy=in_fp32)
        for unit in units:
            if self.compute.compile:  # exclude the gathering hooks, which would break the graph
                unit.forward = torch.compile(unit.forward, mode=self.compute.compile_mode)
            fill(unit)
            stale_check.note(unit)
            shard(unit, mp_policy=self._precision(unit))
        if self.compute.compile and not units:
            model.forward = torch.compile(model.forward, mode=self.compute.compile_mode)
        fill(model)
        stale_check.note(model)
        shard(model, mp_policy=self._precision(model, is_root=True))
        stale_check.guard()
        if self.settings.find_unused_parameters:
            cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        if self.settings.reshard_after_forward is None:
            model.register_forward_hook(self._reshard_without_gradient)
        by_chunks = self.order.by_chunks and self.num_replicas > 1  # a single rank reduces nothing
        shards = add_by_chunks(model, self.order.num_chunks, self.order.checks) if by_chunks else ()
        self.order.attach(model, shards)
        self.notes.append(
            f"fsdp: {len(units)} units (modules that are sharded separately) and the root module"
            + (f"; {len(norms)} batch norms are separate units in fp32" if norms else "")
        )
        return model

    def _precision(self, unit: nn.Module, is_root: bool = False) -> MixedPrecisionPolicy:
        """Return the dtypes in which a unit is gathered, computed and reduced.

        Shards keep their dtype. As under autocast, nothing is cast in fp32, and float64 is never cast, unless
        strategy.param_dtype is set. The root's output is cast to fp32 for the loss.
        """
        reduce_dtype = DTYPES[self.settings.reduce_dtype]
        own = [p for p in unit.parameters() if not isinstance(p, DTensor)] or list(unit.parameters())
        is_double = all(parameter.dtype == torch.float64 for parameter in own)
        if self.settings.param_dtype is None and (self.compute.precision == "fp32" or is_double):
            return MixedPrecisionPolicy(reduce_dtype=None if reduce_dtype == torch.float32 else reduce_dtype)
        return MixedPrecisionPolicy(self.param_dtype, reduce_dtype, torch.float32 if is_root else None)

    def prepare(self, state: TrainState) -> None:
        if self.settings.find_unused_parameters:
            self._used = UsedParameters(state.model, self.device)

    def forward_groups(self) -> list[dist.ProcessGroup]:
        return self.mesh.get_all_groups()

    def aggregate(self, model: nn.Module) -> None:
        super().aggregate(model)
        if self._used is not None:
            self._used.drop_unused()

    def explain(self, error: Exception, phase: Phase) -> UserError | None:
        return explained(error, phase, self.param_dtype)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """With strategy.gather_for_evaluation, gather the model, so that passes don't communicate."""
        self._gathers_model = self.settings.gather_for_evaluation
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule) and self._gathers_model]
        with self.explaining("evaluation"):
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        frees = self.settings.reshard_after_forward
        for unit in units:
            unit.set_reshard_after_forward(unit is not model if frees is None else frees, recurse=False)
            unit.reshard()
        self._gathers_model = False

    @property
    def param_dtype(self) -> torch.dtype:
        return DTYPES[self.settings.param_dtype or self.compute.precision]

    def _units(self, model: nn.Module, excluded: list[nn.Module]) -> list[nn.Module]:
        """Return the submodules to gather one at a time, children before parents, without the root."""
        names = {module: name for name, module in model.named_modules()}
        can_be_gathered = functools.partial(is_self_contained, holders=holders_of(model))
        units = named_units(model) or list(
            units_by_size(model, self.settings.unit_min_params, can_be_gathered)
        )
        sharing = [unit for unit in units if not can_be_gathered(unit)]
        if sharing:
            self.notes.append(
                f"fsdp: {', '.join(names[unit] for unit in sharing)} share parameters with other modules, "
                "and are gathered together with their parent modules"
            )
        positions = {module: number for number, module in enumerate(model.modules())}  # parents first
        return sorted({*units} - {*sharing, *excluded}, key=positions.__getitem__, reverse=True)

    def autocast(self) -> AbstractContextManager:
        return nullcontext()  # the mixed precision policy casts parameters and inputs

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        sharded = cast(FSDPModule, model)
        if self.settings.reduce_every_micro_batch or self.order.by_chunks:
            sharded.set_requires_all_reduce(enabled)  # hybrid: reduce shards over replicas once per step
        else:
            sharded.set_requires_gradient_sync(enabled)
        return self.order.chunk(enabled)

    def weights_changed(self, model: nn.Module) -> None:
        # Drop gathered copies that outlive a forward pass: the root's, or all if reshard_after_forward=false.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _reshard_without_gradient(self, root: nn.Module, *_: object) -> None:
        """Reshard the root after a forward pass without gradients, because no backward pass will do so."""
        if not torch.is_grad_enabled() and not self._gathers_model:
            cast(FSDPModule, root).reshard()

    def replica_groups(self) -> list[tuple[int, ...]]:
        # Hybrid: the ranks of a mesh column have the same shard.
        return [tuple(column) for column in self.mesh.mesh.T.tolist()] if self.mesh.ndim == 2 else []


class UsedParameters:
    """Finds the parameters that no rank used in a step, to which torch gives gradients of zeros.

    An update with zeros would apply weight decay and momentum to these parameters. Under ddp, they have no
    gradient.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._shards = list(model.parameters())
        self._numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        self._flags = torch.zeros(len(self._shards))
        self._device, self._followed = device, set[nn.Parameter]()
        for prefix, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                cast(nn.Module, unit).register_forward_pre_hook(functools.partial(self._follow, prefix))

    def _follow(self, prefix: str, module: nn.Module, *_: object) -> None:
        """Register a hook on each gathered parameter; torch reuses the objects in later steps."""
        for name, parameter in module.named_parameters(prefix):
            is_known = parameter in self._followed or is_dtensor(parameter)
            if parameter.requires_grad and name in self._numbers and not is_known:
                self._followed.add(parameter)
                note = functools.partial(self._note, self._numbers[name])
                parameter.register_post_accumulate_grad_hook(note)

    def _note(self, number: int, *_: object) -> None:
        self._flags[number] = 1

    def drop_unused(self) -> None:
        """Drop the gradients of unused parameters, after the last backward pass of a step (a collective)."""
        flags = self._flags.to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        for shard, used in zip(self._shards, flags.tolist(), strict=True):
            if not used:
                shard.grad = None
        self._flags.zero_()
