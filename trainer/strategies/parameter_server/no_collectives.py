"""Finds a collective where some ranks would never come to it."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")


class NoCollectives(TorchDispatchMode):
    """Around code of others, in one thread: raises UserError in place of a collective that it calls.

    Costs some microseconds an operation, so it stands around a first call alone.

    Args:
        words: who must not call one, why, and the way out; what was called is put into its `{}`.
    """

    supports_higher_order_operators = True  # it takes them as they are

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls what it is made of
        if getattr(func, "namespace", "") in _NAMESPACES and func._opname not in _BETWEEN_TWO:
            raise UserError(self._words.format(func))
        return func(*args, **(kwargs or {}))
