"""Copies of a model's buffers, which forward passes change."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.plain_names import buffer_locations, named_buffers
from trainer.tensors.bits import same_bits
from trainer.torch_private import version_of

_SMALL_BYTES = 1 << 20


class KeptBuffers:
    """Copies of a model's buffers as they were after the last step.

    After each step, all small buffers are copied, and those large buffers, such as masks, whose version
    counter has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = buffer_locations(model)
        live = {name: self._buffer(name) for name in self._places}
        self._large = {name: buffer for name, buffer in live.items() if buffer.nbytes > _SMALL_BYTES}
        self._versions = {name: version_of(buffer) for name, buffer in self._large.items()}
        self._large = {name: buffer.detach().clone() for name, buffer in self._large.items()}
        small = [name for name in live if name not in self._large]
        kinds = {(live[name].device, live[name].dtype) for name in small}
        self._kinds = [
            [name for name in small if (live[name].device, live[name].dtype) == kind] for kind in kinds
        ]
        self._small = self._packed()

    def keep(self) -> None:
        if self._kinds:
            self._small = self._packed()
        for name, kept in self._large.items():
            buffer = self._buffer(name)
            if version_of(buffer) != self._versions[name]:
                self._versions[name] = version_of(buffer)
                kept.copy_(buffer.detach())

    def kept(self) -> Mapping[str, Tensor]:
        """Return the copies, by their names in the model.

        Raises:
            UserError: if a large buffer was changed without updating its version counter, for example through
                numpy(), or if a forward pass registered or removed a buffer.
        """
        if {name for name, _ in named_buffers(self._model)} != self._places.keys():
            raise UserError("a forward pass has registered or removed buffers")
        for name, kept in self._large.items():
            buffer = self._buffer(name)
            if version_of(buffer) == self._versions[name] and not same_bits(buffer.detach(), kept):
                raise UserError(
                    f"the buffer {name} was changed without an update of its version counter, as by numpy()"
                )
        copies = dict(self._large)
        for names, packed in zip(self._kinds, self._small, strict=True):
            live = [self._buffer(name) for name in names]
            parts = packed.split([buffer.numel() for buffer in live])
            copies |= {name: part.view(b.shape) for name, part, b in zip(names, parts, live, strict=True)}
        return copies

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the kept values back to the buffers. Raises as `kept` does."""
        for name, value in self.kept().items():
            self._buffer(name).copy_(value)

    def _packed(self) -> list[Tensor]:
        """Copy the small buffers, of which a model may have hundreds, to one tensor for each dtype and
        device.
        """
        return [
            torch.cat([self._buffer(name).detach().reshape(-1) for name in names]) for names in self._kinds
        ]

    def _buffer(self, name: str) -> Tensor:
        buffer: Tensor = getattr(*self._places[name])
        return buffer
