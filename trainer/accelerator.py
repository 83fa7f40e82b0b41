"""The one place that asks which kind of device a run computes on: its streams, events, memory, generators.

Built on `torch.accelerator`: CUDA (ROCm too, which torch calls cuda), XPU, and MPS in a single process. A CPU
has streams and events that do nothing, for it has computed when a call returns. Flags of CUDA's libraries are
in distributed/backend_flags.py.
"""

import random
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
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
        wanted: "auto", or the kind.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "cpu" or here is None or wanted not in ("auto", here.type):
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
    """A stream beside the current one; where there is none, as under MPS, the current one."""
    if not is_accelerator(device):
        return _DONE
    return current_stream(device) if device.type == "mps" else torch.Stream(device)


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


class HostCopy:
    """The copy of a scalar on the host, made on a stream beside the current one of `device`.

    `read` waits for the copy alone, and not for what was queued behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._made = device, stream(device), event(device)
        self._copy = torch.zeros((), pin_memory=can_pin(device))

    def start(self, number: Tensor) -> None:
        """Copy `number`, of shape (), when the current stream has computed it."""
        if not is_accelerator(number.device):
            self._copy = number
            return
        if self._copy.dtype != number.dtype:  # to convert it would take a kernel
            self._copy = torch.zeros((), dtype=number.dtype, pin_memory=can_pin(self._device))
        self._stream.wait_stream(current_stream(self._device))
        with on(self._stream):
            self._copy.copy_(number, non_blocking=True)
            self._made.record()
        keep_for(number, self._stream)

    def read(self) -> float:
        self._made.synchronize()
        return self._copy.item()


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator of `device`; torch.manual_seed takes 30 times as long, and seeds all."""
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators == ():  # of CUDA before its first use
        module.init()
        generators = module.default_generators
    (module if generators is None else generators[device.index]).manual_seed(seed % 2**64)


@contextmanager
def generators_kept(of_accelerators: bool = True) -> Iterator[None]:
    """Restore every generator of this process afterwards; those of a CPU alone take 0.1 ms."""
    python_state, numpy_state, kind, devices = random.getstate(), np.random.get_state(), "cpu", range(0)
    if of_accelerators and (here := torch.accelerator.current_accelerator()) is not None:
        module: Any = torch.get_device_module(here)
        # A process that never used a GPU has no state there, and asking would create a context on GPU 0.
        is_initialized = getattr(module, "is_initialized", lambda: False)()
        kind, devices = here.type, range(torch.accelerator.device_count() if is_initialized else 0)
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def can_pin(device: torch.device) -> bool:
    """Whether copies from pinned memory of the host to `device` need not be waited for."""
    return device.type in ("cuda", "xpu")


def free_cache(device: torch.device) -> None:
    """Give memory that torch holds unused back to the device."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def peak_memory_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Peak memory of each: what torch's allocator held of an accelerator, a CPU's resident set."""
    if not any(map(is_accelerator, devices)):
        return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    own = filter(is_accelerator, devices)
    return {str(device): torch.accelerator.max_memory_allocated(device) for device in own}


def name(device: torch.device) -> str:
    """The name that its driver gives it; without one, its kind."""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def identity(device: torch.device) -> str:
    """Tells it from the others of its host, whatever each process calls it; "" if its driver does not say."""
    module: Any = torch.get_device_module(device)
    properties = getattr(module, "get_device_properties", lambda device: None)(device)
    return str(getattr(properties, "uuid", ""))
