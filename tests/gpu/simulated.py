"""A simulated accelerator: tensors are on the device `sim:0`, with their values on the CPU.

Each operation runs when it is called, but is ordered as on a GPU, by streams, events and waits of the host.
An access that may conflict with another stream raises `Race`, in each run alike, which threads instead of
streams would not. A copy to the host contains garbage until the host has waited. Work on a stream after
`hang` is never done. Not simulated: DDP's reducer and FSDP, which need real memory, and kernels with
different bits.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainer import accelerator
from trainer.checkpoint import savable
from trainer.comm import overlap
from trainer.optim import param_groups
from trainer.strategies import ddp

CAN_SIMULATE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
_ROOT = f"{Path(__file__).parents[2]}/"
# These launch nothing.
_VIEWS = "view _unsafe_view detach alias slice select unsqueeze squeeze permute transpose t expand as_strided split "
_VIEWS += "split_with_sizes unbind reshape _reshape_alias unflatten lift_fresh empty empty_strided empty_like new_empty "
_VIEWS += "new_empty_strided is_pinned view_as_real record_stream set_"
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero"}


class Race(AssertionError):  # noqa: N818
    """Memory was read or written before another stream was known to have written or read it."""


class Hangs(AssertionError):  # noqa: N818
    """The host waits for work that is never done."""


class Stream:
    """A stream; `clock` is the number of operations of each stream that are done after its last one."""

    def __init__(self, device: Any = None, name: str = "") -> None:
        assert not IS_MPS, "its only stream is there"
        self.name, self.clock = name or f"stream {len(SIM.streams)}", Counter[str]()
        self.hangs_from: float = float("inf")
        SIM.streams[self.name] = self

    def wait_stream(self, other: Stream | Event) -> None:
        self.clock |= other.clock

    wait_event = wait_stream

    def synchronize(self) -> None:
        SIM.wait(self.clock, "stream")

    def hang(self) -> None:
        self.hangs_from = self.clock[self.name] + 1

    def __enter__(self) -> None:
        SIM.here.stack = [*getattr(SIM.here, "stack", []), self]

    def __exit__(self, *_: object) -> None:
        SIM.here.stack = SIM.here.stack[:-1]


class Event:
    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.clock = Counter[str]()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or SIM.current()).clock)

    def query(self) -> bool:
        if passed := not SIM.hangs(self.clock):
            SIM.arrive(self.clock)
        return passed

    def synchronize(self) -> None:
        SIM.wait(self.clock, "event")

    def elapsed_time(self, end: Event) -> float:
        return float((end.clock - self.clock).total())


class Memory:
    """The last write to a storage, and the reads since then."""

    def __init__(self, owner: Stream) -> None:
        self.owner, self.kept_for = owner, {owner.name}
        self.writer, self.written, self.read, self.line = owner.name, 0, Counter[str](), ""

    def touch(self, stream: Stream, writes: bool) -> None:
        name, clock = stream.name, stream.clock
        if self.writer != name and clock[self.writer] < self.written:
            raise Race(f"{name} does not wait for {self.writer}, which writes this at {self.line}")
        if not writes:
            self.read[name] = clock[name]
            return
        if late := [reader for reader, at in self.read.items() if reader != name and clock[reader] < at]:
            raise Race(f"{name} writes what {late[0]} may still read")
        self.writer, self.written, self.read, self.line = name, clock[name], Counter(), line()

    def __del__(self) -> None:
        """Return the memory to the stream on which it was allocated."""
        for name, at in {**self.read, self.writer: self.written}.items():
            if name not in self.kept_for and max(self.owner.clock[name], SIM.host[name]) < at:
                SIM.faults.append(f"freed while {name} may still use it, which {self.line} wrote")


class Simulator:
    """The device: records launches, reads and waits by phase of the run and source line."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.here, self.host, self.lock = threading.local(), Counter[str](), threading.RLock()
        self.pending: list[tuple[Counter[str], Callable[[], object]]] = []
        self.launches, self.reads, self.waits = (Counter[tuple[str, str]]() for _ in range(3))
        self.log: list[tuple[str, str, str]] = []  # stream, operation, line
        self.faults: list[str] = []
        self.phase, self.hung = "", lambda: None

    def current(self) -> Stream:
        return (getattr(self.here, "stack", None) or [self.streams["main"]])[-1]

    def launch(self, what: str, stream: Stream) -> None:
        stream.clock |= self.host
        stream.clock[stream.name] += 1
        self.launches[self.phase, line()] += 1
        self.log.append((stream.name, what, line()))

    def hangs(self, clock: Counter[str]) -> bool:
        return any(clock[name] >= stream.hangs_from for name, stream in self.streams.items())

    def wait(self, clock: Counter[str], how: str) -> None:
        self.waits[self.phase, f"{line()} {how}"] += 1
        self.log.append(("host", "waits", line()))
        if self.hangs(clock):
            self.hung()
            raise Hangs(f"{line()} waits for a stream that hangs")
        self.arrive(clock)

    def arrive(self, clock: Counter[str]) -> None:
        with self.lock:  # a run waits in several threads
            self.host |= clock
            there = [copy for at, copy in self.pending if at <= self.host]
            self.pending = [(at, copy) for at, copy in self.pending if not at <= self.host]
            for copy in there:
                copy()

    def wait_for_all(self, device: Any = None) -> None:
        clock = Counter[str]()
        for stream in self.streams.values():
            clock |= stream.clock
        self.wait(clock, "device")

    def clear(self) -> None:
        for each in (self.launches, self.reads, self.waits, self.log):
            each.clear()


SIM = Simulator()
IS_MPS = False  # whether the device is like a Mac's GPU: without float64, collectives and streams of its own
MAIN, COMM = Stream(name="main"), Stream(name="comm")


def line() -> str:
    """Return the innermost source line of the project on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ROOT) and "site-packages" not in file and file != __file__:
            return f"{file.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


class Sim(torch.Tensor):
    raw: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, memory: Memory) -> Sim:
        layout = (raw.shape, raw.stride(), raw.storage_offset())
        made = torch.Tensor._make_wrapper_subclass(cls, *layout, dtype=raw.dtype, device="sim:0")  # type: ignore[attr-defined]
        made.raw, made.memory = raw, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sim({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.kept_for.add(stream.name)


class Factories(TorchDispatchMode):
    """Handles functions that create tensors on the device, which have no tensor arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func.overloadpacket.__name__, kwargs.get("device")
    pinned = kwargs.pop("pin_memory", None)
    sims = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Sim)]
    moves = bool(sims) and name == "_to_copy" and device is not None and not _is_ours(device)
    to_host = moves or (bool(sims) and name == "copy_" and not isinstance(args[0], Sim))
    stream = None
    if (sims or _is_ours(device)) and name not in _VIEWS.split():
        stream = SIM.current()
        if func.namespace == "c10d":
            COMM.wait_stream(stream)
            stream = COMM
        SIM.launch(name, stream)
        arguments = zip(func._schema.arguments, [*args, *[None] * len(func._schema.arguments)], strict=False)
        named = [(each, kwargs.get(each.name) if given is None else given) for each, given in arguments]
        written = [given for each, given in named if each.alias_info is not None and each.alias_info.is_write]
        ids = {id(each) for each in tree_leaves(written)}
        for each in sims if not SIM.hangs(stream.clock) else ():
            each.memory.touch(stream, writes=id(each) in ids)
    if to_host and (kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2])):
        assert stream is not None
        value = (args[1] if name == "copy_" else args[0]).raw.clone()
        target = args[0] if name == "copy_" else torch.empty_like(value, device="cpu")  # which torch pins
        if name == "copy_" and not getattr(target, "pinned", False):
            SIM.wait(stream.clock, "copy")
        target.fill_(-77)
        with SIM.lock:
            SIM.pending.append((Counter(stream.clock), lambda: target.copy_(value)))
        return target
    if to_host or (sims and name in _READS):
        SIM.reads[SIM.phase, f"{line()} {name}"] += 1
        SIM.wait(SIM.current().clock, "read")
    elif name == "_to_copy" and _is_ours(device) and not sims and not kwargs.get("non_blocking"):
        SIM.wait(SIM.current().clock, "copy")  # the host waits until the stream gets there
    never = stream is not None and SIM.hangs(stream.clock)
    if IS_MPS and func.namespace == "c10d" and sims:
        raise RuntimeError("No backend type associated with device type mps")
    raws = {id(each): each.raw.clone() if never else each.raw for each in sims}

    def plain(value: Any) -> Any:
        if isinstance(value, Sim):
            return raws[id(value)]
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "sim" else value

    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if stream is COMM and name not in ("send", "recv_"):
        out[-1].wait()  # gloo moves the values on threads of its own
    if to_host or not (sims or _is_ours(device)):
        return out
    if device is not None and not _is_ours(device):  # empty_like
        out.pinned = bool(pinned)
        return out
    same = {id(raws[id(each)]): each for each in sims} if func._schema.is_mutable else {}
    homes = {raws[id(each)].untyped_storage()._cdata: each.memory for each in sims}

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in same:
            return same.get(id(value), value)
        if IS_MPS and value.dtype == torch.float64:
            raise TypeError(f"MPS doesn't support float64, which {line()} makes")
        if (memory := homes.get(value.untyped_storage()._cdata)) is None:
            memory = Memory(SIM.current())
            if stream is not None:
                memory.touch(stream, writes=True)
        return Sim(value, memory)

    return tree_map(made, out)


class SimFuture:
    """A torch Future that knows its device."""

    def __init__(self, devices: Any = None) -> None:
        self.done = Event()

    def set_result(self, value: Any) -> None:
        self.value = value
        self.done.record()

    def wait(self) -> Any:
        SIM.current().wait_event(self.done)
        return self.value


class Reducer(nn.Module):
    """Replaces DistributedDataParallel: one bucket, which is reduced after the last gradient."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module, self.process_group = module, dist.group.WORLD
        self._own, self._arrived = list(module.parameters()), 0
        for parameter in self._own:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def register_comm_hook(self, state: None, hook: Any) -> None:
        self._hook = hook

    def forward(self, *inputs: Any) -> Any:
        self._arrived = 0
        return self.module(*inputs)

    def _arrive(self, _: Any) -> None:
        self._arrived += 1
        if self._arrived < len(self._own):
            return
        gradients: list[Any] = [parameter.grad for parameter in self._own]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._hook(None, SimpleNamespace(buffer=lambda: row, index=lambda: 0, is_last=lambda: True)).wait()
        MAIN.wait_stream(COMM)
        for gradient, part in zip(gradients, row.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))


@contextlib.contextmanager
def simulated(as_mps: bool = False) -> Iterator[Simulator]:
    """Simulate the device. Call in a separate process, because torch cannot unregister it."""
    global IS_MPS
    IS_MPS, accelerator.MPS = as_mps, "sim" if as_mps else "mps"
    backend_registration._setup_privateuseone_for_python_backend("sim")
    module, here, tensor, wait = (
        torch.get_device_module("sim"),
        torch.accelerator,
        torch.tensor,
        dist.Work.wait,
    )
    nothing: Any = lambda *_: None  # noqa: E731
    own = {
        module: {"get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16], "set_rng_state": nothing}
        | {"manual_seed": nothing, "set_device": nothing, "get_rng_state": lambda *_: torch.zeros(1)},
        here: {"current_stream": lambda device=None: SIM.current(), "synchronize": SIM.wait_for_all}
        | {"set_device_index": nothing, "empty_cache": nothing, "max_memory_allocated": lambda *_: 0},
        torch: {"Stream": Stream, "Event": Event}
        | {"tensor": lambda *a, device=None, **k: tensor(*a, **k).to(device or "cpu")},
        torch.Tensor: {"pin_memory": lambda tensor, *_: (setattr(tensor, "pinned", True), tensor)[1]},
        # As of NCCL: the current stream waits, not the host.
        dist.Work: {"wait": lambda work, *t: (SIM.current().wait_stream(COMM), wait(work, *t))[1]},
        dist: {"batch_isend_irecv": lambda all_: [p.op(p.tensor, p.peer, p.group, p.tag) for p in all_]},
        accelerator: {"can_pin": lambda device: device.type == "sim" and not as_mps},
        param_groups: {"FUSED": frozenset({"sim"})},
        overlap: {"Future": SimFuture},
        ddp: {"DistributedDataParallel": Reducer},
        clip_grad: {"_has_foreach_support": lambda *_: True},
        savable: {"unsavable": nothing},  # which a subclass of Tensor is
    }
    for holder, values in own.items():
        for name, value in values.items():
            setattr(holder, name, value)
    dist.Backend.default_device_backend_map["sim"] = "gloo"
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    uncast = torch.library.Library("_", "IMPL")
    uncast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    with Factories():
        yield SIM
