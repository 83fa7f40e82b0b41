"""Find what one pass of a sharded model changes in the copies that FSDP gathers, where the change is lost."""

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
    """Follows one pass of a sharded model: what it changes in gathered copies, which FSDP frees, is lost.

    After each unit's forward pass this rank's rows of its parameters are compared with its shard: together,
    ranks compare all.

    Attributes:
        names: of the gathered parameters, the leaves of the graph.
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
                begin, end = partial(self._begin, prefix), partial(self._end, prefix)
                self._handles += [
                    module.register_forward_pre_hook(begin),
                    # Before FSDP's hook, which frees the unit.
                    module.register_forward_hook(end, prepend=True),
                ]

    def compare_root(self) -> None:
        """Called after the loss, which may have changed the root's parameters since the root's call."""
        self._end("", self._model)

    def close(self) -> None:
        """Called after the pass.

        Raises:
            UserError: on this rank: the pass has changed one.
        """
        for handle in self._handles:
            handle.remove()
        if changed := sorted(self._changed):
            raise UserError(
                f"strategy=fsdp: a forward pass or the loss changes {first_few(changed)} in a gathered copy "
                "(its values or requires_grad), so that the change is lost. Compute with another tensor "
                "(weight.clamp(-c, c)), or use strategy=ddp"
            )
        for parameter in self.names:
            parameter.grad = None

    def _begin(self, prefix: str, module: nn.Module, *_: Any) -> None:
        for name, parameter in _gathered(prefix, module):
            if parameter not in self.names:
                self.names[parameter], self._versions[parameter] = name, version_of(parameter)

    @torch.no_grad()
    def _end(self, prefix: str, module: nn.Module, *_: Any) -> None:
        for name, now in _gathered(prefix, module):
            if (shard := self._shards.get(name)) is None:
                raise UserError(
                    f"strategy=fsdp: a forward pass makes the parameter {name}, of which no rank would have "
                    "a shard; make it in __init__, or use strategy=ddp"
                )
            is_same = now in self.names and now.requires_grad == shard.requires_grad
            # Also where the values are the same by chance, as a teacher's that is still equal to its student.
            is_same = is_same and version_of(now) == self._versions[now]
            rows = now.detach()[slice(*own_rows(shard))]
            if not is_same or not same_bits(rows, to_local(shard).to(rows.device, rows.dtype)):
                self._changed.add(name)


def _gathered(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a unit, and not those of units within it, while they are gathered."""
    named = module.named_parameters(prefix)
    return ((name, parameter) for name, parameter in named if not is_dtensor(parameter))
