"""Detects collectives that some ranks never reach."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")

OF_WORKERS = (
    "strategy=parameter_server: the forward pass or the loss calls a collective of its own ({}), in which "
    "ranks that only serve, and workers without common steps, never take part; leave it out, or use "
    "strategy=ddp"
)


class NoCollectives(TorchDispatchMode):
    """Around user code in one thread: raises UserError in place of a collective.

    Costs some microseconds for each operation, so it is used only around a first call.

    Args:
        words: who must not call a collective, why, and the way out; `{}` becomes the name of the operation.
    """

    supports_higher_order_operators = True  # they are passed through

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls its parts again
        if getattr(func, "namespace", "") in _NAMESPACES and func._opname not in _BETWEEN_TWO:
            raise UserError(self._words.format(func))
        return func(*args, **(kwargs or {}))
