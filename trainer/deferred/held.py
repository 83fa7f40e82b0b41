"""The tensors that a module holds, by any of its attributes; and others in their places."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OF_MODULES = vars(nn.Module()).keys()  # the attributes that every module has


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called; torch has no public answer."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_gradient_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let gradients pass by the hooks that were registered on `tensors`; torch has no public way."""
    hooks = [each for t in tensors for each in (t._backward_hooks, t._post_accumulate_grad_hooks) if each]
    held = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, held, strict=True):
            each.update(own)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that modules hold otherwise, alone or in lists and dicts."""
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        for key, value in held.items():
            for tensor in _tensors_in(value, set()):
                yield f"{prefix}.{key}" if prefix else key, tensor


def has_other_holders(model: nn.Module, part: nn.Module, name: str) -> bool:
    """Whether a parameter that cannot be swapped, for its weak references, is more than modules' attributes.

    nn.RNNBase, which makes such references, lists its weights once more, and learns of others by setattr.
    """
    if part._parameters[name] is None or not weakref.getweakrefs(part._parameters[name]):
        return False
    attributes = [(each._parameters, each._buffers, vars(each)) for each in model.modules()]
    known = {id(held) for of_one in attributes for held in of_one}
    known |= {id(own.get("_flat_weights")) for *_, own in attributes}
    return any(id(holder) not in known for holder in gc.get_referrers(part._parameters[name]))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Of lists, tuples and dicts, which may hold themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def replace_all(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put what `make` returns in the place of each tensor of `module`; what it returns as it is stays."""
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(module)}.values():
        if (new := make(tensor)) is not tensor:
            replace(module, tensor, new)


def replace(module: nn.Module, old: Tensor, real: Tensor) -> None:
    """Make `old` a real tensor: the same object where it can be, so that all who hold it see it."""
    new = like(old, real)
    if not weakref.getweakrefs(old):
        with contextlib.suppress(RuntimeError):  # part of an autograd graph, as old-style weight_norm leaves
            torch.utils.swap_tensors(old, new)
            return
    for part in module.modules():  # nn.LSTM and its like keep weak references, and learn of it by setattr
        for name, tensor in [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]:
            if tensor is old:
                setattr(part, name, new)


def like(old: Tensor, real: Tensor) -> Tensor:
    """`real` as `old` is: a parameter, trained, with attributes of its user's."""
    if isinstance(old, nn.Parameter):
        real = nn.Parameter(real, old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        real.requires_grad_()
    real.__dict__.update(old.__dict__)
    return real
