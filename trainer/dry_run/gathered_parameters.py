"""Detect changes of the parameters that FSDP gathers, which are lost when the gathered copies are freed."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from trainer.errors import UserError, first_few
from trainer.tensors.bits import same_bits
from trainer.tensors.local_shard import is_dtensor, own_rows, to_local
from trainer.torch_private import version_of


class GatheredParameters:
    """Detects changes of gathered parameters during one pass of a sharded model.

    Attributes:
        names: the names of the gathered parameters, which are the leaves of the autograd graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Tensor, str] = {}
        self._shards = dict(model.named_parameters(remove_duplicate=False))
        self._versions: dict[Tensor, int] = {}
        self._changed: set[str] = set()
        self._model, self._handles = model, list[RemovableHandle]()
        for prefix, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                module = cast(nn.Module, unit)
                self._handles += [
                    module.register_forward_pre_hook(partial(self._before_forward, prefix)),
                    # Prepended to FSDP's hook, which frees the unit.
                    module.register_forward_hook(partial(self._after_forward, prefix), prepend=True),
                ]

    def compare_root(self) -> None:
        """Compare the root's parameters again, because the loss may have changed them."""
        self._after_forward("", self._model)

    def close(self) -> None:
        """Remove the hooks after the pass.

        Raises:
            UserError: on this rank only, if the pass changed a gathered parameter.
        """
        for handle in self._handles:
            handle.remove()
        if changed := sorted(self._changed):
            raise UserError(
                f"strategy=fsdp: the forward pass or the loss changes {first_few(changed)} (values or "
                "requires_grad) in a gathered copy, where the change is lost. Use an out-of-place "
                "operation (weight.clamp(-c, c)), or use strategy=ddp"
            )
        for parameter in self.names:
            parameter.grad = None

    def _before_forward(self, prefix: str, module: nn.Module, *_: Any) -> None:
        for name, parameter in _gathered(prefix, module):
            if parameter not in self.names:
                self.names[parameter], self._versions[parameter] = name, version_of(parameter)

    @torch.no_grad()
    def _after_forward(self, prefix: str, module: nn.Module, *_: Any) -> None:
        for name, now in _gathered(prefix, module):
            if (shard := self._shards.get(name)) is None:
                raise UserError(
                    f"strategy=fsdp: the forward pass creates the parameter {name}, of which no rank has a "
                    "shard; create it in __init__, or use strategy=ddp"
                )
            is_same = now in self.names and now.requires_grad == shard.requires_grad
            # Compare versions too: the values may be equal, like a teacher's that still equals its student.
            is_same = is_same and version_of(now) == self._versions[now]
            rows = now.detach()[slice(*own_rows(shard))]
            if not is_same or not same_bits(rows, to_local(shard).to(rows.device, rows.dtype)):
                self._changed.add(name)


def _gathered(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    named = module.named_parameters(prefix)
    return ((name, parameter) for name, parameter in named if not is_dtensor(parameter))
