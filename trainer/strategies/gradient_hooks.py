"""Hooks that users register on gradients: which parameters have some, and what users should know of it."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called; torch has no public check."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


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
