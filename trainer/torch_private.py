"""All uses of torch's private names, with their reasons.

The names are checked on import, so that a torch version that lacks one fails at the start. Some names are
only assigned to, so a wrong name would change results without an error.
"""

import functools
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_WORKERS = "torch.utils.data._utils.worker"


_PRIVATE = (
    "torch.nn:Module._version",
    "torch:Tensor._version",
    "torch:_foreach_norm",
    "torch:_foreach_copy_",
    "torch.autograd:_profiler_enabled",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch._ops:OpOverload",
    f"{_WORKERS}:_worker_info",
    "torch.distributed:ProcessGroup._get_sequence_number_for_group",
)


def missing() -> list[str]:
    """Return the private names that this version of torch lacks."""
    found = []
    for name in _PRIVATE:
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            found.append(name.replace(":", "."))
    return found


if _missing := missing():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}, which Ringmaster uses; install torch 2.11 "
        "to 2.14, or a newer Ringmaster"
    )

OpOverload = import_module("torch._ops").OpOverload
"""The type of the operators in torch.ops.aten, which selective activation checkpointing requires."""

TorchDispatchMode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
"""The base class of context managers that intercept each operator, also within autograd."""

profiler_enabled = torch.autograd._profiler_enabled
"""Return whether a profiler is active. If not, adding a range to its trace would waste 30 us."""

foreach_norm, foreach_copy = torch._foreach_norm, torch._foreach_copy_
"""One kernel for many tensors; for a small model, the public get_total_norm takes three times as long."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place changes of a tensor, as counted by autograd."""


def load_compiler() -> None:
    """Import the modules that an optimizer, DDP and DTensor import at their first use."""
    import_module("torch._dynamo")


def fake_tensor_mode() -> Any:
    """Return a context in which tensors have a shape and a device, but no memory."""
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Return whether `tensor` was created in a `fake_tensor_mode`."""
    return isinstance(tensor, import_module("torch._subclasses.fake_tensor").FakeTensor)


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of `module` itself; named_parameters() would skip duplicates."""
    return {**module._parameters, **module._buffers}


def with_versions(saved: dict[str, Any], model: nn.Module) -> Any:
    """Return a state dict with the version of each module, as in the result of `Module.state_dict`."""
    versioned: Any = type(model.state_dict())(saved)
    versioned._metadata = {name: {"version": module._version} for name, module in model.named_modules()}
    return versioned


def set_last_lr(schedule: LRScheduler, rates: list[Any]) -> None:
    """Set the value of `schedule.get_last_lr()`, which torch's schedulers set in `step`."""
    if not hasattr(schedule, "_last_lr"):
        raise AttributeError(
            f"torch {torch.__version__} has no LRScheduler._last_lr; use torch 2.14 or older"
        )
    schedule._last_lr = rates


def flight_recorder() -> bytes | None:
    """Return torch's record of the last collectives as JSON; None before torch 2.14."""
    dump = getattr(import_module("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    return None if dump is None else bytes(dump())


def record_memory_history(max_entries: int | None) -> None:
    """Start recording CUDA memory allocations; None stops it. torch documents this private function."""
    options: dict[str, Any] = {"enabled": None} if max_entries is None else {"max_entries": max_entries}
    torch.cuda.memory._record_memory_history(**options)


def write_memory_history(file: Path) -> None:
    """Write the recorded allocations, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))


def fake_store() -> dist.Store:
    """Return a store for the backend "fake", whose collectives do nothing, to simulate one of many ranks."""
    store: dist.Store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    return store


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return the number of collectives of `group` that this process has started."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


@contextmanager
def outside_data_worker() -> Iterator[None]:
    """Make get_worker_info() return None in the block, because some streams split themselves by worker."""
    worker: Any = import_module(_WORKERS)
    worker._worker_info, info = None, worker._worker_info
    try:
        yield
    finally:
        worker._worker_info = info


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether `skipped_on_device` works for `optimizer`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _can_skip(cast(Any, type(optimizer)))


@contextmanager
def skipped_on_device(optimizer: Any, found: Tensor) -> Iterator[None]:
    """Within the block, make steps of `optimizer` change nothing if `found`, fp32 on its device, is 1."""
    optimizer.found_inf, optimizer.grad_scale = found, None
    yield
    del optimizer.found_inf, optimizer.grad_scale


@functools.cache
def _can_skip(kind: Any) -> bool:
    """Try on the CPU whether fused steps of the optimizer class `kind` can be skipped on the device.

    Returns False for classes outside torch, which may change parameters in addition to torch's step.
    """
    if not kind.__module__.startswith("torch.optim."):
        return False
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), torch.nan)
    optimizer = kind([parameter], lr=1.0, fused=True)
    with skipped_on_device(optimizer, torch.ones(())):
        optimizer.step()
    return bool(parameter.detach() == 0)
