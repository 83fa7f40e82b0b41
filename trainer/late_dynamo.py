"""Keeps torch's optimizers and dispatch modes from importing torch._dynamo where nothing is compiled.

That import takes as long as all of torch's others together.
"""

import functools
import sys
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils._python_dispatch import TorchDispatchMode


def import_dynamo_late(*kinds: type[Optimizer] | type[TorchDispatchMode]) -> None:
    """Let methods of these classes skip torch's decorators until something else has imported torch._dynamo.

    One decorator excludes a method from compilation, the other tells the compiler where a graph ends. Both
    import the compiler, and are of no use without it. Called before the first object is made.
    """
    for kind in kinds:
        for name, method in list(vars(kind).items()):
            if (code := getattr(method, "__code__", None)) in (_EXCLUDED, _STEP):
                setattr(kind, name, _late(method, sets_grad=code is _STEP))


def _nothing() -> None: ...


# A decorated method is recognized by the code of torch's wrapper, which has no public name.
_EXCLUDED = torch._disable_dynamo(_nothing).__code__
_STEP = _use_grad_for_differentiable(_nothing).__code__


def _late(method: Any, sets_grad: bool) -> Any:
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
