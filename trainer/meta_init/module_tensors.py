"""The tensors in a module, under any of its attributes; and their replacement."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OF_MODULES = vars(nn.Module()).keys()  # attributes of every module


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called; torch has no public check."""
    return any(num_gradient_hooks(tensor))


def num_gradient_hooks(tensor: Tensor) -> tuple[int, int]:
    """How often register_hook and register_post_accumulate_grad_hook were called."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


def hooked_parameters(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if has_gradient_hook(parameter)}


def hooks_per_rank_note(names: Iterable[str], strategy: str) -> str:
    """For the user: hooks on the gradients of the parameters of these names run before ranks are averaged."""
    return (
        f"{strategy}: hooks on the gradients of {', '.join(sorted(names)[:5])} get each rank's own, "
        "before it is averaged over ranks, so the result depends on the number of ranks"
    )


def hooks_per_micro_batch_note(names: Iterable[str]) -> str:
    """For the user: these hooks run once for each of several micro-batches."""
    return (
        f"hooks on the gradients of {', '.join(sorted(names)[:5])} get those of each micro-batch, "
        "before all are added, so the result depends on train.micro_batch_size"
    )


@contextlib.contextmanager
def without_gradient_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the gradient hooks of `tensors`; torch has no public way."""
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
    """Parameters, buffers, and tensors under other attributes, alone or in lists and dicts."""
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        for key, value in held.items():
            for tensor in _tensors_in(value, set()):
                yield f"{prefix}.{key}" if prefix else key, tensor


def held_elsewhere(model: nn.Module) -> str | None:
    """A parameter that has weak references, so cannot be swapped, and is referred to from elsewhere.

    nn.RNNBase creates such references; it lists its weights a second time, and setattr updates the list.
    """
    parts = list(model.modules())
    unswappable = {
        id(parameter): f"{name} of a {type(part).__name__}"
        for part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None and weakref.getweakrefs(parameter)
    }
    known = {id(held) for part in parts for held in (part._parameters, part._buffers, vars(part))}
    known |= {id(vars(part).get("_flat_weights")) for part in parts}
    others = {id(held) for holder, held in holders(unswappable) if id(holder) not in known}
    return next((words for key, words in unswappable.items() if key in others), None)


def holders(sought: Collection[int]) -> list[tuple[object, Any]]:
    """Pairs of an object and one of these ids' objects to which it refers, found in one search."""
    found: list[tuple[object, Any]] = []
    everything = gc.get_objects() if sought else []
    for begin in range(0, len(everything), 256):  # most refer to none, which is faster to check in blocks
        block = everything[begin : begin + 256]
        if any(id(held) in sought for held in gc.get_referents(*block)):
            for holder in block:
                found += [(holder, held) for held in gc.get_referents(holder) if id(held) in sought]
    return found


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dicts, which may contain themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def replace_all(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor of `module` by the result of `make`, unless that is the tensor itself."""
    tensors = {id(tensor): tensor for _, tensor in named_tensors(module)}
    replace(module, ((old, new) for old in tensors.values() if (new := make(old)) is not old))


def replace(module: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Replace the first of each pair by the second: in place if possible, so that all references follow."""
    others: dict[int, tuple[Tensor, Tensor]] = {}
    for old, real in pairs:
        new = like(old, real)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # it has weak references, or is in an autograd graph, as by the old weight_norm
            others[id(old)] = old, new
    for part in module.modules() if others else ():  # nn.LSTM creates weak references; setattr updates it
        for name, tensor in [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]:
            if id(tensor) in others:
                setattr(part, name, others[id(tensor)][1])


def like(old: Tensor, real: Tensor) -> Tensor:
    """`real` with the properties of `old`: a parameter, requires_grad, attributes set by users."""
    if isinstance(old, nn.Parameter):
        real = nn.Parameter(real, old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        real.requires_grad_()
    real.__dict__.update(old.__dict__)
    return real
