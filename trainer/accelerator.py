"""The one place that asks which kind of device a run computes on: its streams, events and memory.

Built on `torch.accelerator`: CUDA (ROCm too, which torch calls cuda) and XPU. A CPU has streams and events
that do nothing, for it has computed when a call returns. CUDA's flags are in distributed/backend_flags.py.
"""

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUSED = frozenset({"cuda", "xpu"})
"""Kinds on which torch's fused optimizers are fastest; they read on the device whether to skip a step."""


class _Done:
    """The stream of a CPU, and its events: all is computed."""

    def wait_stream(self, of: Any = None) -> None: ...

    wait_event = record = synchronize = wait_stream

    def query(self) -> bool:
        return True


_DONE = _Done()


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` computes beside the host, which then waits only where it reads."""
    return device.type not in ("cpu", "meta")


def found(wanted: str) -> tuple[str, int]:
    """The kind and number of this process's accelerators; ("cpu", 0) without one.

    Args:
        wanted: the kind, or "auto". MPS is left alone: it has no float64, in which losses are added up.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type == "mps" or wanted not in ("auto", here.type):
        return "cpu", 0
    return here.type, torch.accelerator.device_count()


def backend_of(device: torch.device) -> str:
    """The backends of torch.distributed for tensors on the host and on `device`."""
    own = dist.get_default_backend_for_device(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def use(device: torch.device) -> None:
    """Make `device` the current one of this thread, which otherwise opens a context on the first one."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def stream(device: torch.device) -> Any:
    """A stream beside the current one."""
    return torch.Stream(device) if is_accelerator(device) else _DONE


def current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device) if is_accelerator(device) else _DONE


def on(stream: Any) -> AbstractContextManager[Any]:
    """Within, this thread queues its work on `stream`."""
    return nullcontext() if stream is _DONE else stream


def event(device: torch.device, timing: bool = False) -> Any:
    """An event, to be recorded on a stream; `elapsed_time` needs `timing`, and an accelerator."""
    return torch.Event(device, enable_timing=timing) if is_accelerator(device) else _DONE


def keep_for(tensor: Tensor, stream: Any) -> None:
    """Called when `stream` reads a tensor of another stream: its memory is kept until that is done."""
    if stream is not _DONE:
        tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was queued."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def can_pin(device: torch.device) -> bool:
    """Whether copies from pinned memory of the host to `device` need not be waited for."""
    return device.type in ("cuda", "xpu")


def peak_memory_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Peak memory of each: what torch's allocator held of an accelerator, a CPU's resident set."""
    if not any(map(is_accelerator, devices)):
        unit = 1 if sys.platform == "darwin" else 1024  # a Mac tells bytes
        return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {str(one): torch.accelerator.max_memory_allocated(one) for one in devices if is_accelerator(one)}


def name(device: torch.device) -> str:
    """The name that its driver gives it; without one, its kind."""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
