"""Keeps torch's optimizers, DDP and dispatch modes from importing torch._dynamo where nothing is compiled.

That import takes as long as all of torch's others together.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._python_dispatch import TorchDispatchMode


def import_dynamo_late(
    *kinds: type[Optimizer] | type[TorchDispatchMode] | type[DistributedDataParallel],
) -> None:
    """Let methods of these classes skip torch's decorators until something else has imported torch._dynamo.

    One decorator excludes a method from compilation, the other tells the compiler where a graph ends. Both
    import the compiler, and are of no use without it. Called before the first object is made.
    """
    for kind in kinds:
        for name, method in list(vars(kind).items()):
            if (code := getattr(method, "__code__", None)) in (_EXCLUDED, _STEP):
                setattr(kind, name, _late(method, sets_grad=code is _STEP))
            elif code is _MANAGER and method.__wrapped__.__code__ is _EXCLUDED:
                setattr(kind, name, contextmanager(_late(method.__wrapped__)))


@contextmanager
def default_ddp_mode() -> Iterator[None]:
    """Around the constructor of DDP, which asks torch._dynamo how the compiler is to treat DDP.

    Until something imports torch._dynamo nobody can have changed that setting: the answer is its default.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    utils = _Unimported("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = _Unimported("torch._dynamo", utils=utils)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo  # the next to ask torch for it imports it


class _Unimported:
    """Stands for a module that is imported only when it is asked for more than the given `answers`."""

    def __init__(self, name: str, **answers: Any) -> None:
        self._name = name
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def _nothing() -> None: ...


# A decorated method is recognized by the code of torch's wrapper, which has no public name.
_EXCLUDED = torch._disable_dynamo(_nothing).__code__
_STEP = _use_grad_for_differentiable(_nothing).__code__
_MANAGER = default_ddp_mode.__code__  # that of any function made by contextmanager


def _late(method: Any, sets_grad: bool = False) -> Any:
    function = method.__wrapped__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return method(self, *args, **kwargs)
        if not sets_grad:
            return function(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return function(self, *args, **kwargs)

    return call
