"""Sharding by fully_shard: over which ranks, which parts of a model it supports, what its errors mean."""

import functools
import traceback
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_few
from trainer.optim.optimizers import sparse_weights
from trainer.strategies.placement import refuse_several_devices, refuse_shared_memory
from trainer.tensors.local_shard import is_dtensor

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def sharding_mesh(shard_group: str, ranks: Ranks) -> DeviceMesh:
    """(shard) or (replicate, shard), for strategy.shard_group.

    Raises:
        UserError: it does not divide the ranks; on every rank.
    """
    every = range(ranks.world_size)
    if shard_group == "host":
        rows = ranks_by_host(ranks.hosts)
    else:
        size = ranks.world_size if shard_group == "world" else int(shard_group)
        if ranks.world_size % size:
            raise UserError(
                f"strategy.shard_group={shard_group} makes groups of {size} ranks, which do not divide the "
                f"{ranks.world_size} ranks of this run; use a divisor of {ranks.world_size}, or world"
            )
        rows = [list(every[begin : begin + size]) for begin in every[::size]]
    if len(rows) == 1:
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    return DeviceMesh(ranks.device.type, rows, mesh_dim_names=("replicate", "shard"))


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, in any numbering.

    Raises:
        UserError: hosts have different numbers of ranks; on every rank.
    """
    rows = [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        raise UserError(
            f"strategy.shard_group=host needs as many ranks on each host, but these have {counts}; use "
            "strategy.shard_group=world, or start as many on each"
        )
    return rows


def _refuse_held(name: str, parameter: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: the forward pass uses {name} by a reference kept in a list, a dict or a function, "
        "which sharding cannot follow; read it from its module where it is used; or use strategy=ddp"
    )


class StaleReferenceCheck:
    """Refuses the use of parameters that sharding has replaced.

    Code may refer to one other than by a module's attribute, such as by a list or a closure. It would always
    compute with the initial value, and no optimizer would get the gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._held: dict[str, weakref.ref[nn.Parameter]] = {}

    def note(self, unit: nn.Module) -> None:
        """Record, by weak references, the parameters of `unit`, which is sharded next."""
        for name, parameter in unit.named_parameters():
            if not is_dtensor(parameter):
                self._held[self._prefixes[unit] + name] = weakref.ref(parameter)

    def guard(self) -> None:
        """Have the first gradient of a replaced parameter end the run; an unused reference is allowed."""
        for name, reference in self._held.items():
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_held, name))


def holders_of(model: nn.Module) -> dict[object, set[nn.Module]]:
    """The modules that have each parameter, or module, as an attribute: several, if it is shared."""
    holders: dict[object, set[nn.Module]] = {}
    for module in model.modules():
        for held in (*module.parameters(recurse=False), *module.children()):
            holders.setdefault(held, set()).add(module)
    return holders


def is_closed(module: nn.Module, holders: dict[object, set[nn.Module]]) -> bool:
    """Whether no module outside has a parameter of `module`: fully_shard cannot have one in two units."""
    within = set(module.modules())
    parts = (part for part in within - {module} if any(True for _ in part.parameters()))
    return all(holders[held] <= within for held in (*module.parameters(), *parts))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with a weight beside their running statistics."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS) and module.affine]


def refuse_what_cannot_be_sharded(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise UserError, by name, for parameters that fully_shard would refuse later or less clearly."""
    refuse_several_devices(model, "strategy=fsdp")
    refuse_shared_memory(model, "strategy=fsdp")
    scripted = {p for m in model.modules() if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()}
    reasons = {
        "no dimension; give them one, of size 1": lambda parameter: parameter.ndim == 0,
        "no elements; leave them out": lambda parameter: parameter.numel() == 0,
        "gaps or another order in memory; call .contiguous() before nn.Parameter": lambda parameter: (
            not parameter.is_contiguous()
        ),
        "complex numbers: torch's fully_shard would sum only their real parts": torch.is_complex,
        "a hook on the gradient, which would get shards": lambda parameter: bool(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ),
        "a sparse gradient; build the embedding with sparse=False": sparse_weights(model).__contains__,
        "a module of torch.jit.script; leave that out, perhaps for train.compile": scripted.__contains__,
    }
    for reason, applies in reasons.items():
        if found := [name for name, parameter in model.named_parameters() if applies(parameter)]:
            raise UserError(
                f"strategy=fsdp cannot shard {first_few(found)}: parameters with {reason}; or use "
                "strategy=ddp"
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
                f"strategy=fsdp gathers a unit's parameters as one, but finds {listed}: add the module of "
                "one of the two to the model's fsdp_units, give both the same dtype, or use strategy=ddp"
            )


def explained(error: Exception, phase: str, param_dtype: torch.dtype) -> UserError | None:
    """What an error in a `phase` of strategies.base means, if known.

    Args:
        param_dtype: in which parameters are gathered.
    """
    said = str(error)
    is_mixed = "mixed torch.Tensor and DTensor" in said
    if is_mixed and phase == "evaluation":
        return UserError(
            f"strategy=fsdp: {_user_line(error)} uses parameters outside of the model's forward pass, where "
            "they are sharded, for example in generate() or encode(); set "
            "strategy.gather_for_evaluation=true, which gathers the whole model on each rank for an "
            "evaluation. If that doesn't fit in memory, use them in forward(), or use strategy=ddp"
        )
    if is_mixed and phase == "backward":
        return UserError(
            "strategy=fsdp: the loss uses parameters outside of the model's forward pass, where they are "
            "sharded, as a penalty over model.parameters() does; use optim.weight_decay, compute the "
            "penalty in the forward pass, or use strategy=ddp"
        )
    if is_mixed:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} uses a parameter of a unit, which is gathered only "
            "while the unit itself is called; in a loss call model(...), and no part of it; or add to the "
            "model's fsdp_units a module that has all that this line uses, or fewer; without fsdp_units, set "
            "strategy.unit_min_params above the size of that unit; and compute no gradient "
            "through a unit in the forward pass; or use strategy=ddp"
        )
    if "appears to not have been used in the graph" in said:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} differentiates by what the outputs do not depend on, as "
            "by model.parameters(): outside of a forward pass these are shards; use strategy=ddp"
        )
    if "out of bounds for storage of size 0" in said:
        return UserError(
            "strategy=fsdp: the backward pass went a second time through a unit, whose parameters are "
            "freed after the first: a gradient of a gradient (torch.autograd.grad with create_graph) can "
            "be computed within a unit, but not through one; use strategy=ddp"
        )
    if param_dtype != torch.float32 and isinstance(error, RuntimeError) and "dtype" in said:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} mixes dtypes: {error}. Parameters are gathered, and "
            f"units' inputs cast, as {param_dtype}, but buffers keep their dtype; cast at that "
            "line, or use strategy.param_dtype=fp32, or strategy=ddp"
        )
    return None


def _user_line(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = str(Path(torch.__file__).parent)
    at = next((frame for frame in reversed(frames) if not frame.filename.startswith(torchs)), frames[-1])
    return f"{at.filename}:{at.lineno} ({at.line})"
