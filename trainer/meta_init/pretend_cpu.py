"""Makes tensors on the meta device appear to be on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.meta_init.recorder import InitRecorder, NotRecordable
from trainer.nested import mapped

# They return a value, not a tensor: computed at once.
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


class PretendCpuMode(TorchFunctionMode):
    """Makes tensors appear to be on the CPU, and computes the values that a constructor reads (`.item()`).

    Initialisers, torch's own among them, skip tensors on the meta device.
    """

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda tensor: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: lambda tensor: torch.device("cpu"),
            Tensor.data_ptr: recorder.address,
            Tensor.untyped_storage: _refuse_memory,
            Tensor.storage: _refuse_memory,
            Tensor.type: _type,
            Tensor.cpu: self._to,
            Tensor.to: self._to,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._answers and self._recorder.holds(args[0]):
            return self._answers[func](*args, **(kwargs or {}))
        if func in _READS:
            args = mapped(args, self._value)
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False  # writes to it would be lost
        return result

    def _value(self, value: Any) -> Any:
        return (
            self._recorder.value(value)
            if isinstance(value, Tensor) and self._recorder.holds(value)
            else value
        )

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The behaviour of a CPU tensor, which `.to("cpu")` and `.cpu()` return unchanged."""
        others = [value for value in (*args, kwargs.get("other")) if isinstance(value, Tensor)]
        dtypes = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        dtypes += [other.dtype for other in others]
        devices = [value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device | str)]
        devices += [other.device for other in others if not self._recorder.holds(other)]
        stays = all(torch.device(device).type == "cpu" for device in devices)
        flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
        copies = kwargs.get("copy") or flags[1:] == [True]
        if not stays or copies or kwargs.get("memory_format") not in (None, torch.preserve_format):
            return tensor.to(*args, **kwargs)
        return tensor.to(dtypes[0]) if dtypes else tensor


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = tensor.type(*args, **kwargs)
    return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found


def _refuse_memory(tensor: Tensor) -> Any:
    raise NotRecordable("it asks for the memory of a tensor, which has none yet")
