"""Buffers that a forward pass changes: the next forward pass of each rank starts from those of rank 0."""

import inspect
import types
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.strategies.shardable import BATCH_NORMS

_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_FORWARDS = {kind.forward for kind in _NORMS}
_STATISTICS = {"running_mean", "running_var"}
_SMALL_BYTES = 1 << 20  # sending these costs less than asking all ranks, which waits for the device


def are_statistics(model: nn.Module) -> bool:
    """Whether all buffers are running statistics of torch's norms, which training writes and never reads.

    Then they need not be equal in training: those of rank 0 follow its own data in any case, and are used for
    evaluation and saving. A subclass with its own forward pass may read them, and so may a model whose code
    names them: for these it is False.
    """
    holders = [module for module in model.modules() if any(True for _ in module.buffers(recurse=False))]
    only_norms = all(isinstance(each, _NORMS) and type(each).forward in _FORWARDS for each in holders)
    return only_norms and not (holders and _names_statistics(model))


def _names_statistics(model: nn.Module) -> bool:
    """Whether the code of the model's classes, or of functions that it uses by name, names the statistics."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    waiting = [each for kind in kinds if not _is_torchs(kind) for each in _functions(kind)]
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        names = set(_names(function.__code__))
        if names & _STATISTICS:
            return True
        used = {each for name in names if inspect.isfunction(each := function.__globals__.get(name))}
        new = {each for each in used if not _is_torchs(each)} - seen
        seen |= new
        waiting += new
    return False


def _is_torchs(code: type | types.FunctionType) -> bool:
    return str(code.__module__).partition(".")[0] in ("torch", "builtins")


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The functions that a class defines itself, undecorated: methods, also static ones, and properties."""
    for value in vars(kind).values():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(function):
            yield inspect.unwrap(function)


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and globals in `code`, and its text constants."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):  # of getattr
            yield constant
        elif inspect.iscode(constant):
            yield from _names(constant)


class ChangedBuffers:
    """Sends the buffers of rank 0 to all before each forward pass, as DDP does, once a pass has changed any.

    Otherwise ranks would continue from their own, and a resumed run from those of rank 0. Large constants,
    such as masks, are not sent: before each pass they are compared with a copy made before the first, and all
    ranks are asked. Their values are compared, not their versions, which do not count what is written through
    `data` or `numpy`.

    Args:
        model: unwrapped, or sharded by FSDP.
        sync: sends the buffers of rank 0 to all (a collective).
        on_any: whether its argument is true on any rank (a collective).
        small_bytes: up to this size in all, buffers are always sent.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Callable[[], None],
        on_any: Callable[[bool], bool],
        small_bytes: int = _SMALL_BYTES,
    ) -> None:
        self._model, self._sync, self._on_any = model, sync, on_any
        self._first: list[Tensor] | None = None
        self._need_no_sync = are_statistics(model)
        self._sends = sum(buffer.nbytes for buffer in model.buffers()) <= small_bytes

    def before_forward(self) -> None:
        """Called before each forward pass in training, on all ranks (a collective)."""
        if self._need_no_sync:
            return
        if not self._sends:
            now = [buffer.detach() for buffer in self._model.buffers()]
            if self._first is None:
                self._first = [buffer.clone() for buffer in now]
            changed = len(now) != len(self._first) or not all(map(_equal, now, self._first))
            self._sends = self._on_any(changed)
            if self._sends:
                self._first = None
        if self._sends:
            self._sync()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same bits, in any dtype; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def any_of(here: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `here` is true on any rank of `group` (a collective)."""
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found)
