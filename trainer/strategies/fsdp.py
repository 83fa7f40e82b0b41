"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered unit by unit."""

import functools
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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

from trainer.config import FsdpConfig
from trainer.deferred import has_gradient_hook
from trainer.distributed import Dist
from trainer.errors import UserError
from trainer.strategies.base import DTYPES, Fill, Strategy
from trainer.strategies.reads import read_from_outside
from trainer.strategies.units import CONTAINERS, units_by_size

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        # Parameters are gathered and multiplied in this dtype and kept in fp32; the root's output, from
        # which the loss is computed, is fp32 again.
        param_dtype = DTYPES[self.settings.param_dtype or self.precision]
        precision = MixedPrecisionPolicy(param_dtype, reduce_dtype=DTYPES[self.settings.reduce_dtype])
        root_precision = MixedPrecisionPolicy(param_dtype, precision.reduce_dtype, output_dtype=torch.float32)
        # Running statistics are fp32, and so must be the weight beside them; the input is taken as it comes.
        in_fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
        norms = _batch_norms(model) if param_dtype != torch.float32 else []
        units = self._units(model, norms)
        _refuse_what_cannot_be_sharded(model, [*norms, *units])
        shard = functools.partial(
            fully_shard,
            mesh=self.mesh,
            reshard_after_forward=self.settings.reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy(),
        )
        # Each unit has its values only when it is sharded: it is whole in memory during a step, too.
        whole = _WholeParameters(model)
        for norm in norms:
            fill(norm)
            whole.note(norm)
            shard(norm, mp_policy=in_fp32)
        for unit in units:
            if self.compile_model:  # without the hooks that gather it, at which torch would give up
                unit.forward = torch.compile(unit.forward)
            fill(unit)
            whole.note(unit)
            shard(unit, mp_policy=precision)
        if self.compile_model and not units:
            model.forward = torch.compile(model.forward)
        fill(model)
        whole.note(model)
        shard(model, mp_policy=root_precision)
        whole.guard()
        if self.settings.reshard_after_forward is None:
            model.register_forward_hook(_reshard_without_gradient)
        if self.settings.prefetch_units is not None:
            _prefetch(model, self.settings.prefetch_units)
        self.notes.append(
            f"fsdp: {len(units)} units and the root"
            + (f"; {len(norms)} batch norms are units of their own, in fp32" if norms else "")
        )
        return model

    def _units(self, model: nn.Module, apart: list[nn.Module]) -> list[nn.Module]:
        """The submodules to gather one at a time, children before parents, none twice; the root is none.

        Raises:
            UserError: `fsdp_units` names what is no submodule, or is never called.
        """
        names, kind = {module: name for name, module in model.named_modules()}, type(model).__name__
        owners, read = _owners(model), read_from_outside(model)

        def can_be_gathered(module: nn.Module) -> bool:
            return module not in read and _is_closed(module, owners)

        chosen = getattr(model, "fsdp_units", None)
        if not chosen:
            chosen = units_by_size(model, self.settings.unit_min_params, can_be_gathered)
        units = dict.fromkeys(chosen)
        for unit in units:
            if unit not in names or unit is model:
                raise UserError(f"fsdp_units of {kind} holds {_short(unit)}, no submodule of it")
            if isinstance(unit, CONTAINERS):
                raise UserError(
                    f"fsdp_units of {kind} holds {names[unit]}, a {type(unit).__name__}: never "
                    "called, and so never gathered; name the modules in it"
                )
        torn = [unit for unit in units if not can_be_gathered(unit)]
        if torn:
            self.notes.append(
                f"fsdp: {', '.join(names[unit] for unit in torn)} share parameters with modules outside, or "
                "have them read there (self.head.weight), and are gathered with what is around them"
            )
        order = {module: number for number, module in enumerate(model.modules())}  # parents come first
        kept = units.keys() - {*torn, *apart}
        return sorted(kept, key=order.__getitem__, reverse=True)

    @contextmanager
    def autocast(self) -> Iterator[None]:  # the mixed precision policy casts parameters and inputs
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"strategy=fsdp: {where.filename}:{where.lineno} ({where.line}) uses a parameter of a unit, "
                "which is whole only while the unit itself is called; name as one of the model's fsdp_units "
                "a module that holds this line's and all that it uses, or name fewer; without fsdp_units, "
                "take strategy.unit_min_params above the size of that unit; or take strategy=ddp"
            ) from error

    def grad_scaler(self) -> torch.amp.GradScaler:
        # Sharded: an overflow in one rank's shard must skip the step on all. Its flag is a plain tensor
        # beside DTensor gradients, which torch replicates as meant, and warns.
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
        return ShardedGradScaler(self.device.type, enabled=self.precision == "fp16")

    @contextmanager
    def gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        sharded = cast(FSDPModule, model)
        if self.settings.reduce_every_micro_batch:
            sharded.set_requires_all_reduce(enabled)  # hybrid: shards meet their replicas once a step
        else:
            sharded.set_requires_gradient_sync(enabled)
        yield

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights_changed(self, model: nn.Module) -> None:
        # Whole copies that outlive a forward pass (the root's, or all with reshard_after_forward=false).
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def equal_ranks(self) -> list[tuple[int, ...]]:
        # Hybrid: those that hold the same shard, which is a column of the mesh.
        return [tuple(column) for column in self.mesh.mesh.T.tolist()] if self.mesh.ndim == 2 else []


def _reshard_without_gradient(root: nn.Module, *_: object) -> None:
    """The root stays whole for the backward pass; where none follows, nobody is to find it so."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, root).reshard()


def _prefetch(model: nn.Module, depth: int) -> None:
    """Have each unit ask for the next `depth` ones when its own parameters have come, both ways.

    The host then issues their all-gathers earlier, and so many more units are whole at a time. By itself
    torch gathers one ahead in the backward pass and, on CUDA streams alone, in the forward pass. The order is
    that in which the modules stand.
    """
    begun: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    ended: list[FSDPModule] = [module for module in _children_first(model) if isinstance(module, FSDPModule)]
    for order, prefetch in (
        (begun, FSDPModule.set_modules_to_forward_prefetch),
        (list(dict.fromkeys(ended))[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for number, unit in enumerate(order, start=1):
            prefetch(unit, order[number : number + depth])


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class _WholeParameters:
    """The parameters that sharding takes the place of, lest somebody goes on with them.

    Who holds one otherwise than as a module's attribute, in a list or a closure, would compute with its first
    value for ever, and it would get a gradient that no optimizer sees.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._held: dict[str, weakref.ref[nn.Parameter]] = {}

    def note(self, unit: nn.Module) -> None:
        """Remember, without holding them, those that `unit` is about to have sharded."""
        for name, parameter in unit.named_parameters():
            if not isinstance(parameter, DTensor):
                self._held[self._prefixes[unit] + name] = weakref.ref(parameter)

    def guard(self) -> None:
        """Let the first gradient of one that is held still end the run; who only keeps it may."""
        for name, reference in self._held.items():
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_held, name))


def _refuse_held(name: str, parameter: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: the forward pass uses {name} by a reference kept in a list, a dict or a function, "
        "which sharding cannot follow; take it from its module where it is used; or take strategy=ddp"
    )


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


def _owners(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """The modules that have each parameter as an attribute of their own: several, where weights are tied."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    return owners


def _is_closed(module: nn.Module, owners: dict[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether no module outside has a parameter of `module`: fully_shard cannot have one in two units."""
    within = set(module.modules())
    return all(owners[parameter] <= within for parameter in module.parameters())


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    """Those with a weight beside their running statistics."""
    return [module for module in model.modules() if isinstance(module, _BATCH_NORMS) and module.affine]


def _refuse_what_cannot_be_sharded(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise UserError, by name, for parameters that fully_shard would refuse later or in other words."""
    reasons = {
        "no dimension; give them one, of size 1": lambda parameter: parameter.ndim == 0,
        "no elements; leave them out": lambda parameter: parameter.numel() == 0,
        "gaps or another order in memory; call .contiguous() before nn.Parameter": lambda parameter: (
            not parameter.is_contiguous()
        ),
        "a hook on the gradient, which comes in shards": has_gradient_hook,
    }
    for reason, applies in reasons.items():
        if found := [name for name, parameter in model.named_parameters() if applies(parameter)]:
            raise UserError(
                f"strategy=fsdp cannot shard {', '.join(found[:5])}: parameters with {reason}; or take "
                "strategy=ddp"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"strategy=fsdp cannot shard {name or 'the model'}, a ScriptModule; take strategy=ddp"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for unit in (*units, model):
        dtypes: dict[torch.dtype, str] = {}
        for parameter in unit.parameters():
            if parameter not in taken and parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, names[parameter])
            taken.add(parameter)
        if len(dtypes) > 1:
            listed = " beside ".join(f"{dtype} in {name}" for dtype, name in dtypes.items())
            raise UserError(
                f"strategy=fsdp gathers a unit's parameters as one, and finds {listed}: name the module of "
                "one of the two in the model's fsdp_units, give both the same dtype, or take strategy=ddp"
            )


def _short(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)[:60]
