"""What a user's optimizer reads from sharded tensors, and writes into parts of them."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.errors import UserError
from trainer.local_shard import is_dtensor
from trainer.optim.combined import has_user_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, torch.is_nonzero, Tensor.__contains__),
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__),
}
# Functions whose result is in the memory of their argument, if it is not sharded.
_VIEWS = {
    *("__getitem__", "select", "narrow", "chunk", "tensor_split", "split", "hsplit", "vsplit", "unbind"),
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"),
    *("t", "T", "mT", "transpose", "permute", "movedim", "swapaxes", "expand", "expand_as", "unfold"),
    *("diagonal", "as_strided", "detach", "data"),
}
_NEVER = {"data=", "index_add_", "index_copy_"}  # torch does them on the wrong memory, without a word


def whole_scalars(optimizer: Optimizer, reads: bool = True) -> AbstractContextManager[Any]:
    """The context of a step of `optimizer`, in which a number read from a sharded tensor is the whole one's.

    torch reads this rank's part: `float(gradient.norm())` is the norm of its own rows, and ranks would make
    different updates. And a part of a sharded tensor, such as `parameter[0]`, may be a copy: what is written
    into it would be lost, and is refused. torch's own optimizers do neither, and are spared a call in Python
    for each operation.

    Args:
        reads: whether ranks make their steps together, since reading is then a collective.
    """
    return _WholeTensors(reads) if has_user_part(optimizer) else nullcontext()


class _WholeTensors(TorchFunctionMode):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self._reads = reads
        self._copies: dict[int, weakref.ref[Tensor]] = {}  # of parts, by id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if self._reads and func in _READS and is_dtensor(first):
            args = (first.full_tensor(), *args[1:])
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", "") + "=" * (name == "__set__")
        for written in _sharded(_written(name, first, kwargs)):
            into_item = name == "__setitem__" and _is_basic(args[1]) and _is_copy(written[args[1]], written)
            if name in _NEVER or into_item or self._holds(written):
                raise UserError(
                    f"an optimizer's step writes by {name} into a part of a sharded tensor, such as "
                    "parameter[0], or replaces its data: that would be lost. Update whole tensors, with "
                    "torch.where for parts of them; or use strategy=ddp"
                )
        result = func(*args, **kwargs)
        if name in _VIEWS and is_dtensor(first) and (name != "__getitem__" or _is_basic(args[1])):
            lost = self._holds(first)
            for part in _sharded([result]):
                if lost or _is_copy(part, first):
                    self._copies[id(part)] = weakref.ref(part)
        return result

    def _holds(self, tensor: Tensor) -> bool:
        reference = self._copies.get(id(tensor))
        return reference is not None and reference() is tensor


def _written(name: str, first: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments in which a function of this name writes: its first, or `out`."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in ("__setitem__", "data=") or (name.startswith("__i") and name.endswith("__")):
        yield first
    yield kwargs.get("out")


def _sharded(values: Iterable[Any]) -> list["DTensor"]:
    return [leaf for leaf in tree_leaves(list(values)) if is_dtensor(leaf)]


def _is_basic(index: Any) -> bool:
    """Whether an index gives a view: an advanced one copies from any tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)


def _is_copy(part: Tensor, of: "DTensor") -> bool:
    """Whether torch has gathered `part` for a function that gives views of other tensors."""
    assert is_dtensor(part)
    pairs = zip(part.placements, of.placements, strict=True)
    return any(was.is_shard() and not now.is_shard() for now, was in pairs)
