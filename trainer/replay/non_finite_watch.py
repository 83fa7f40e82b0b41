"""Find where the first NaN or Inf of a step appears."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.context import Run
from trainer.data.device import ToDevice
from trainer.data.loading.reader import Request
from trainer.distributed.agreement import gather_objects
from trainer.model.plain_names import plain_name
from trainer.tensors.nested import leaves


class NonFinite(NamedTuple):
    """The place in a step where the first NaN or Inf appears."""

    direction: str  # forward or backward
    module: str  # its name; "" for the whole model
    where: str  # a phrase
    rank: int
    samples: list[int]  # their indices, if only some rows of the tensor are not finite

    def __str__(self) -> str:
        samples = f", sample {', '.join(map(str, self.samples))}" if self.samples else ""
        return f"{self.direction} pass, {self.where}{samples}, on rank {self.rank}"


class NonFiniteWatch:
    """Finds the first module that produces a NaN or Inf.

    In the forward pass, -Inf is ignored, because attention masks contain it. In the backward pass, the module
    found is the innermost module that gets a finite gradient for its output, but returns a non-finite
    gradient for its input or its parameters.

    Args:
        requests: the micro-batches of this rank.
    """

    def __init__(self, rank: int, requests: Sequence[Request]) -> None:
        self._rank, self._requests, self._micro_batch = rank, requests, -1
        self._forward: NonFinite | None = None
        self._bad_inputs, self._bad_outputs = dict[str, NonFinite](), dict[str, NonFinite]()

    @contextmanager
    def watching(self, run: Run) -> Iterator[Run]:
        """Yield a copy of `run` whose steps are watched while the context is open."""
        handles = []
        for wrapped_name, module in run.state.model.named_modules():
            name = plain_name(wrapped_name)
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            yield replace(
                run, data=run.data._replace(to_device=ObservedTransfer(self.next_batch, run.data.to_device))
            )
        finally:
            for handle in handles:
                handle.remove()

    def first(self) -> NonFinite | None:
        """Return the first NaN or Inf on any rank (a collective)."""
        found = [each for each in gather_objects(self._own()) if each is not None]
        return min(found, key=lambda each: each.direction != "forward", default=None)

    def next_batch(self, _: Any) -> None:
        self._micro_batch += 1

    def _own(self) -> NonFinite | None:
        if self._forward is not None:
            return self._forward
        makers = [name for name in self._bad_inputs if name not in self._bad_outputs]
        # A module that contains another one of them has only passed on its gradient.
        inner = (
            name
            for name in makers
            if not any(other.startswith(f"{name}." if name else "") for other in makers if other != name)
        )
        if (name := next(inner, None)) is not None:
            return self._bad_inputs[name]
        return next(iter(self._bad_outputs.values()), None)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._check(name, "the input of", (args, kwargs), self._bad_inputs, "the gradient for the input of")
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            hook = partial(self._check_grad, name, f"the gradient of {parameter_name}, in", self._bad_inputs)
            if parameter.requires_grad:
                parameter.register_hook(hook)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._check(name, "the output of", output, self._bad_outputs, "the gradient for the output of")

    def _check(self, name: str, what: str, values: Any, bad: dict[str, NonFinite], gradient: str) -> None:
        for value in leaves(values):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if self._forward is None and (is_bad := value.isnan() | value.isposinf()).any():
                self._forward = self._found("forward", name, what, is_bad)
            if value.requires_grad and torch.is_grad_enabled():
                value.register_hook(partial(self._check_grad, name, gradient, bad))

    def _check_grad(self, name: str, what: str, bad: dict[str, NonFinite], gradient: Tensor) -> None:
        if name not in bad and not (is_finite := gradient.isfinite()).all():
            bad[name] = self._found("backward", name, what, ~is_finite)

    def _found(self, direction: str, name: str, what: str, is_bad: Tensor) -> NonFinite:
        where = f"{what} {name or 'the model'}"
        indices = list(self._requests[self._micro_batch].numbers)
        rows = is_bad.flatten(1).any(1) if is_bad.ndim > 1 else is_bad
        is_batch = is_bad.ndim > 0 and len(rows) == len(indices) and not rows.all()
        samples = [indices[row] for row in rows.nonzero().flatten().tolist()] if is_batch else []
        return NonFinite(direction, name, where, self._rank, samples)


class ObservedTransfer(ToDevice):
    """Calls `observe` with each micro-batch on its device."""

    def __init__(self, observe: Callable[[Any], None], to_device: ToDevice) -> None:
        self._observe, self._to_device = observe, to_device

    def ahead(self, batches: Sequence[Any]) -> None:
        self._to_device.ahead(batches)

    def __call__(self, batch: Any) -> Any:
        moved = self._to_device(batch)
        self._observe(moved)
        return moved
