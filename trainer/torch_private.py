"""Every private name of torch that is used here, with the reason, looked for when this module is loaded.

If a later torch renames one, the program ends at its start. Some are only assigned, so that a wrong name
would change a result without an error.
"""

import functools
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


# None may create a tensor: CUDA's sanitizer, if it is on, then wants a GPU.
_PRIVATE: dict[str, Callable[[], Any]] = {
    "torch.nn.Module._buffers": lambda: nn.Module()._buffers,
    "torch.nn.Module._parameters": lambda: nn.Module()._parameters,
    "torch.nn.Module._version": lambda: nn.Module._version,
    "torch.nn.Module.state_dict()._metadata": lambda: attrgetter("_metadata")(nn.Module().state_dict()),
    "torch.Tensor._version": lambda: torch.Tensor._version,
    "torch._foreach_norm": lambda: torch._foreach_norm,
    "torch._foreach_copy_": lambda: torch._foreach_copy_,
    "torch.autograd._profiler_enabled": lambda: torch.autograd._profiler_enabled,
    "torch.utils._python_dispatch": lambda: import_module("torch.utils._python_dispatch").TorchDispatchMode,
    "torch._ops.OpOverload": lambda: import_module("torch._ops").OpOverload,
    f"{_WORKERS}._worker_info": lambda: attrgetter("_worker_info")(import_module(_WORKERS)),
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": lambda: attrgetter(
        "_get_sequence_number_for_group"
    )(dist.ProcessGroup),
}


def missing() -> list[str]:
    """The private names that this torch lacks."""
    found = []
    for name, get in _PRIVATE.items():
        try:
            get()
        except (AttributeError, ImportError):
            found.append(name)
    return found


if _missing := missing():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}, which Ringmaster uses; install a torch from "
        "2.11 to 2.14, or a later Ringmaster"
    )

OpOverload = import_module("torch._ops").OpOverload
"""The type of torch.ops.aten's operations: selective activation checkpointing is told of them by it."""

TorchDispatchMode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
"""A base class for what sees each operation of torch, also within autograd."""

profiler_enabled = torch.autograd._profiler_enabled
"""Whether a profiler watches: a range in its trace costs 30 us."""

foreach_norm, foreach_copy = torch._foreach_norm, torch._foreach_copy_
"""One kernel for many tensors; torch's public get_total_norm takes three times as long for a small model."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place, as autograd counts."""


def load_compiler() -> None:
    """Import what an optimizer, DDP and DTensor import at their first use; `torch.compiler` loads less."""
    import_module("torch._dynamo")


def fake_tensor_mode() -> Any:
    """A context in which tensors have shapes but no memory, on any device; the meta device has no devices."""
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Whether `tensor` was made in a `fake_tensor_mode`."""
    return isinstance(tensor, import_module("torch._subclasses.fake_tensor").FakeTensor)


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and buffers of `module` itself; named_parameters() leaves out what is registered twice."""
    return {**module._parameters, **module._buffers}


def with_versions(saved: dict[str, Any], model: nn.Module) -> Any:
    """A state dict that tells each module its present version, as `Module.state_dict` does."""
    versioned: Any = type(model.state_dict())(saved)
    versioned._metadata = {name: {"version": module._version} for name, module in model.named_modules()}
    return versioned


def set_last_lr(schedule: LRScheduler, rates: list[Any]) -> None:
    """Set what `schedule.get_last_lr()` returns; torch's own schedules do it in `step`."""
    if not hasattr(schedule, "_last_lr"):
        raise AttributeError(f"torch {torch.__version__} has no LRScheduler._last_lr; use a torch up to 2.14")
    schedule._last_lr = rates


def flight_recorder() -> bytes | None:
    """torch's record of the last collectives, as JSON; None before torch 2.14, which has NCCL's alone."""
    dump = getattr(import_module("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    return None if dump is None else bytes(dump())


def record_memory_history(max_entries: int | None) -> None:
    """Note each allocation on CUDA, or, with None, none any more; torch documents it, underscore and all."""
    options: dict[str, Any] = {"enabled": None} if max_entries is None else {"max_entries": max_entries}
    torch.cuda.memory._record_memory_history(**options)


def write_memory_history(file: Path) -> None:
    """Write what was noted, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))


def fake_store() -> dist.Store:
    """The store of the backend "fake", whose collectives do nothing: one process is a rank of many."""
    store: dist.Store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    return store


def num_collectives(group: dist.ProcessGroup) -> int:
    """How many collectives of `group` this process has begun."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


@contextmanager
def outside_data_worker() -> Iterator[None]:
    """Within, torch.utils.data.get_worker_info() returns None: a stream that sees a worker splits itself."""
    worker: Any = import_module(_WORKERS)
    worker._worker_info, info = None, worker._worker_info
    try:
        yield
    finally:
        worker._worker_info = info


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether each step of `optimizer` can read on the GPU whether to change anything: see below."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _obeys(cast(Any, type(optimizer)))


@contextmanager
def skipped_on_device(optimizer: Any, found: Tensor) -> Iterator[None]:
    """Within, steps of `optimizer` change nothing if `found`, fp32 on its device, is 1."""
    optimizer.found_inf, optimizer.grad_scale = found, None
    yield
    del optimizer.found_inf, optimizer.grad_scale


@functools.cache
def _obeys(kind: Any) -> bool:
    """Whether a fused step of `kind`, a class of torch, does what `skipped_on_device` says: tried on a CPU.

    A user's own class may change parameters beside torch's step: the host waits for the norm before.
    """
    if not kind.__module__.startswith("torch.optim."):
        return False
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), torch.nan)
    optimizer = kind([parameter], lr=1.0, fused=True)
    with skipped_on_device(optimizer, torch.ones(())):
        optimizer.step()
    return bool(parameter.detach() == 0)
