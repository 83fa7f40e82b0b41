"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered unit by unit."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer.config import FsdpConfig
from trainer.distributed import Dist
from trainer.errors import UserError
from trainer.strategies.base import DTYPES, Strategy, parameter_count


class Fsdp(Strategy):
    def __init__(self, settings: FsdpConfig, dist: Dist, precision: str, compile_model: bool) -> None:
        super().__init__(dist.device, precision, compile_model)
        self.settings = settings
        self.num_replicas, self.replica = dist.world_size, dist.rank
        self.mesh = _mesh(settings.shard_group, dist)
        if settings.cpu_offload and dist.device.type == "cpu":
            raise UserError("strategy.cpu_offload=true, but the model trains on the CPU; set it to false")
        if self.mesh.ndim == 2:
            replicate, shard = self.mesh.shape
            self.notes.append(f"fsdp: hybrid, sharded over {shard} ranks, replicated {replicate} times")

    def wrap(self, model: nn.Module) -> nn.Module:
        by_size = _units_by_size(model, self.settings.unit_min_params)
        units = getattr(model, "fsdp_units", None) or list(by_size)
        if not self.settings.cpu_offload:
            model = model.to(self.device)
        # Parameters are gathered and multiplied in this dtype and kept in fp32; the root's output, from
        # which the loss is computed, is fp32 again.
        param_dtype = DTYPES[self.settings.param_dtype or self.precision]
        precision = MixedPrecisionPolicy(param_dtype, reduce_dtype=DTYPES[self.settings.reduce_dtype])
        root_precision = MixedPrecisionPolicy(param_dtype, precision.reduce_dtype, output_dtype=torch.float32)
        shard = functools.partial(
            fully_shard,
            mesh=self.mesh,
            reshard_after_forward=self.settings.reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy(),
        )
        for unit in units:
            if self.settings.activation_checkpointing:
                unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
            if self.compile_model:
                unit.compile()
            shard(unit, mp_policy=precision)
        shard(model, mp_policy=root_precision)
        self.notes.append(f"fsdp: {len(units)} units and the root")
        return model

    def autocast(self) -> AbstractContextManager:
        return nullcontext()  # the mixed precision policy casts parameters and inputs

    def grad_scaler(self) -> torch.amp.GradScaler:
        # Sharded: an overflow in one rank's shard must skip the step on all. Its flag is a plain tensor
        # beside DTensor gradients, which torch replicates as meant, and warns.
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
        return ShardedGradScaler(self.device.type, enabled=self.precision == "fp16")

    @contextmanager
    def gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        cast(FSDPModule, model).set_requires_gradient_sync(enabled)
        yield

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def equal_ranks(self) -> list[tuple[int, ...]]:
        # Hybrid: those that hold the same shard, which is a column of the mesh.
        return [tuple(column) for column in self.mesh.mesh.T.tolist()] if self.mesh.ndim == 2 else []


def _mesh(shard_group: str, dist: Dist) -> DeviceMesh:
    size = {"world": dist.world_size, "host": dist.local_world_size}.get(shard_group) or int(shard_group)
    if dist.world_size % size:
        raise UserError(
            f"strategy.shard_group={shard_group} makes groups of {size} ranks, which do not divide the "
            f"{dist.world_size} ranks of this run; take a divisor of {dist.world_size}, or world"
        )
    if size == dist.world_size:
        return init_device_mesh(dist.device.type, (size,), mesh_dim_names=("shard",))
    shape = (dist.world_size // size, size)
    return init_device_mesh(dist.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _units_by_size(module: nn.Module, min_params: int) -> Iterator[nn.Module]:
    """The smallest submodules of at least `min_params` parameters: each is gathered and freed as one.

    ModuleLists and the like are passed through, since they are never called.
    """
    for child in module.children():
        if parameter_count(child.parameters()) < min_params:
            continue
        within = list(_units_by_size(child, min_params))
        if within or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from within
        else:
            yield child
