"""Tensors on the meta device that seem to lie on the CPU, to those who ask them."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.deferred.tape import Tape, mapped

# Asked for a value, not for a tensor: computed at once.
_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.equal,
    Tensor.allclose,
    torch.equal,
    torch.allclose,
}


class Illusion(TorchFunctionMode):
    """Lets a constructor believe that its tensors lie on the CPU, and gives it what it reads (`.item()`).

    Initialisers, torch's own among them, leave out what they are told is on the meta device.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._seems = {
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._seems and self._tape.holds(args[0]):
            return self._seems[func]
        if func in _READS:
            args = mapped(args, self._value)
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False  # what is written there would be lost
        return result

    def _value(self, value: Any) -> Any:
        return self._tape.value(value) if isinstance(value, Tensor) and self._tape.holds(value) else value
