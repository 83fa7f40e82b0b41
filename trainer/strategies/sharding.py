"""Support for fully_shard: the device mesh, checks of the model, and explanations of torch's errors."""

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
    """Return the mesh for strategy.shard_group, with dimensions (shard) or (replicate, shard).

    Raises:
        UserError: on every rank, if the number of ranks is not divisible by the group size.
    """
    every = range(ranks.world_size)
    if shard_group == "host":
        rows = ranks_by_host(ranks.hosts)
    else:
        size = ranks.world_size if shard_group == "world" else int(shard_group)
        if ranks.world_size % size:
            raise UserError(
                f"strategy.shard_group={shard_group} does not divide the {ranks.world_size} ranks of this "
                f"run into groups of equal size; use a divisor of {ranks.world_size}, or world"
            )
        rows = [list(every[begin : begin + size]) for begin in every[::size]]
    if len(rows) == 1:
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    return DeviceMesh(ranks.device.type, rows, mesh_dim_names=("replicate", "shard"))


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, which need not be consecutive.

    Raises:
        UserError: on every rank, if hosts have different numbers of ranks.
    """
    rows = [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        raise UserError(
            f"strategy.shard_group=host needs the same number of ranks on each host, but the hosts have "
            f"{counts}; start the same number on each, or use strategy.shard_group=world"
        )
    return rows


def _refuse_stale(name: str, parameter: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: the forward pass uses {name} through a reference kept in a list, a dict or a "
        "function, which sharding cannot update; read it from its module where it is used, or use "
        "strategy=ddp"
    )


class StaleReferenceCheck:
    """Raises an error if the model uses parameters that sharding has replaced.

    Code may keep a reference to a parameter in a list or a closure, for example. The code would always
    compute with the initial value, and the optimizer would not get the gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._replaced: dict[str, weakref.ref[nn.Parameter]] = {}

    def note(self, unit: nn.Module) -> None:
        """Record weak references to the parameters of `unit`, which is about to be sharded."""
        for name, parameter in unit.named_parameters():
            if not is_dtensor(parameter):
                self._replaced[self._prefixes[unit] + name] = weakref.ref(parameter)

    def guard(self) -> None:
        """Raise an error as soon as a replaced parameter gets a gradient; unused references are allowed."""
        for name, reference in self._replaced.items():
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_stale, name))


def holders_of(model: nn.Module) -> dict[object, set[nn.Module]]:
    """Return, for each parameter and module, the modules of which it is an attribute."""
    holders: dict[object, set[nn.Module]] = {}
    for module in model.modules():
        for attribute in (*module.parameters(recurse=False), *module.children()):
            holders.setdefault(attribute, set()).add(module)
    return holders


def is_self_contained(module: nn.Module, holders: dict[object, set[nn.Module]]) -> bool:
    """Return whether `module` shares no parameter with modules outside it, as fully_shard requires."""
    within = set(module.modules())
    parts = (part for part in within - {module} if any(True for _ in part.parameters()))
    return all(holders[each] <= within for each in (*module.parameters(), *parts))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS) and module.affine]


def refuse_unshardable(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise UserError for parameters that fully_shard would reject later or with an unclear error."""
    refuse_several_devices(model, "strategy=fsdp")
    refuse_shared_memory(model, "strategy=fsdp")
    scripted = {p for m in model.modules() if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()}
    reasons = {
        "without dimensions. Give them one, of size 1": lambda parameter: parameter.ndim == 0,
        "without elements. Remove them": lambda parameter: parameter.numel() == 0,
        "in non-contiguous memory. Call .contiguous() before nn.Parameter": lambda parameter: (
            not parameter.is_contiguous()
        ),
        "with complex values, of which it would sum only the real parts. Use real tensors": torch.is_complex,
        "with a hook on the gradient, which would get shards. Remove the hook": lambda parameter: bool(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ),
        "with a sparse gradient. Build the embedding with sparse=False": sparse_weights(model).__contains__,
        "of a torch.jit.script module. Use train.compile instead of scripting": scripted.__contains__,
    }
    for reason, applies in reasons.items():
        if found := [name for name, parameter in model.named_parameters() if applies(parameter)]:
            raise UserError(
                f"strategy=fsdp cannot shard {first_few(found)}: it does not support parameters {reason}, or "
                "use strategy=ddp"
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
            listed = " and ".join(f"{dtype} in {name}" for dtype, name in dtypes.items())
            raise UserError(
                f"strategy=fsdp needs one dtype for all parameters of a unit, but found {listed}; add one of "
                "the two modules to the model's fsdp_units, use the same dtype, or use strategy=ddp"
            )


def explained(error: Exception, phase: str, param_dtype: torch.dtype) -> UserError | None:
    """Return a UserError that explains an error raised by torch; None if it is unknown."""
    message = str(error)
    is_mixed = "mixed torch.Tensor and DTensor" in message
    if is_mixed and phase == "evaluation":
        return UserError(
            f"strategy=fsdp: {_user_line(error)} uses parameters outside the model's forward pass, for "
            "example in generate() or encode(). Outside forward(), they are sharded; set "
            "strategy.gather_for_evaluation=true to gather the whole model on each rank during evaluations. "
            "If it doesn't fit in memory, use the parameters in forward(), or use strategy=ddp"
        )
    if is_mixed and phase == "backward":
        return UserError(
            "strategy=fsdp: the loss uses parameters outside the model's forward pass, but there they are "
            "only shards, for example in a penalty over model.parameters(); use optim.weight_decay, compute "
            "the penalty in the forward pass, or use strategy=ddp"
        )
    if is_mixed:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} uses a parameter of a unit, which is gathered only while "
            "the unit itself is called. In a loss, call model(...) and not its submodules. Otherwise, list "
            "in the model's fsdp_units a module that contains everything this line uses, or fewer modules; "
            "without fsdp_units, set strategy.unit_min_params above the size of that unit. Do not compute a "
            "gradient through a unit in the forward pass. Or use strategy=ddp"
        )
    if "appears to not have been used in the graph" in message:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} differentiates with respect to tensors on which the outputs "
            "do not depend, such as model.parameters(), which are shards outside a forward pass; use "
            "strategy=ddp"
        )
    if "out of bounds for storage of size 0" in message:
        return UserError(
            "strategy=fsdp: a second backward pass went through a unit, whose parameters are freed after the "
            "first one. A gradient of a gradient (torch.autograd.grad with create_graph=True) can be "
            "computed inside the forward pass of one unit, but not across units; use strategy=ddp"
        )
    if param_dtype != torch.float32 and isinstance(error, RuntimeError) and "dtype" in message:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} mixes dtypes: {error}. Gathered parameters and the inputs "
            f"of units are {param_dtype}, but buffers keep their dtype; cast the tensor in that line, or use "
            "strategy.param_dtype=fp32, or strategy=ddp"
        )
    return None


def _user_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    torch_dir = str(Path(torch.__file__).parent)
    frame = next((each for each in reversed(frames) if not each.filename.startswith(torch_dir)), frames[-1])
    return f"{frame.filename}:{frame.lineno} ({frame.line})"
