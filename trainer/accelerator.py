"""Devices, streams, events and memory, independent of the device type.

Built on `torch.accelerator`, for CUDA (also ROCm, which torch calls cuda), XPU and MPS. On a CPU, streams and
events do nothing, because calls return after the computation. distributed/backend_flags.py sets CUDA's flags.
"""

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUSED = frozenset({"cuda", "xpu"})
"""Device types on which torch's fused optimizers are fastest; these can skip a step on the device."""
MPS = "mps"  # the GPU of a Mac: without float64, and with a single stream


class _Done:
    """Placeholder for the streams and events of a CPU, whose work is always complete."""

    def wait_stream(self, of: Any = None) -> None: ...

    wait_event = record = wait_stream

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Queued(_Done):
    """The only stream of MPS and its events; waiting for them means waiting for all work on the device."""

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


_DONE, _QUEUED = _Done(), _Queued()


def is_accelerator(device: torch.device) -> bool:
    """Return whether `device` works asynchronously with respect to the CPU."""
    return device.type not in ("cpu", "meta")


def found(wanted: str) -> tuple[str, int]:
    """Return the type and number of accelerators of type `wanted` (any if "auto"), or ("cpu", 0)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or wanted not in ("auto", accelerator.type):
        return "cpu", 0
    if accelerator.type == "mps" and wanted == "auto":  # MPS has only been tested in a simulation
        return "cpu", 0
    return accelerator.type, torch.accelerator.device_count()


def backend_of(device: torch.device) -> str:
    """Return the torch.distributed backends for tensors on the CPU and on `device`."""
    own = dist.get_default_backend_for_device(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def use(device: torch.device) -> None:
    """Make `device` the current device of this thread; by default, it is the first device."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def stream(device: torch.device) -> Any:
    return torch.Stream(device) if _has_streams(device) else _only_stream(device)


def current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device) if _has_streams(device) else _only_stream(device)


def on(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which this thread queues its work on `stream`."""
    return nullcontext() if isinstance(stream, _Done) else stream


def event(device: torch.device, timing: bool = False) -> Any:
    """Return an event to record on a stream; `timing` enables `elapsed_time`, on accelerators only."""
    return torch.Event(device, enable_timing=timing) if _has_streams(device) else _only_stream(device)


def _has_streams(device: torch.device) -> bool:
    return is_accelerator(device) and device.type != MPS


def _only_stream(device: torch.device) -> _Done:
    return _QUEUED if device.type == MPS else _DONE


def keep_for(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of `tensor` allocated until the work queued on `stream` is done."""
    if not isinstance(stream, _Done):
        tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def can_pin(device: torch.device) -> bool:
    """Return whether copies from pinned memory to `device` are asynchronous."""
    return device.type in ("cuda", "xpu")


def has_float64(device: torch.device) -> bool:
    return device.type != MPS


def for_sums(device: torch.device) -> torch.device:
    """Return the device for float64 sums of tensors on `device`: itself, or the CPU if it lacks float64."""
    return device if has_float64(device) else torch.device("cpu")


def double(tensor: Tensor) -> Tensor:
    """Convert `tensor` to float64, on the device that `for_sums` returns."""
    return tensor.to(for_sums(tensor.device), torch.float64)


def peak_memory_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Return peak bytes by device: memory that torch allocated, or on a CPU or Mac, the resident set."""
    if not any(map(_has_streams, devices)):
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else KiB
        return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {str(one): torch.accelerator.max_memory_allocated(one) for one in devices if is_accelerator(one)}


def uuid(device: torch.device) -> str | None:
    """Return the UUID of the device from its driver; None if there is none."""
    if not is_accelerator(device):
        return None
    module: Any = torch.get_device_module(device)
    found = getattr(module.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def name(device: torch.device) -> str:
    """Return the name of the device from its driver, or its type if there is none."""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
