"""Copies of a model's buffers, which forward passes change."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.plain_names import buffer_locations, named_buffers
from trainer.tensors.bits import same_bits
from trainer.torch_private import foreach_copy, version_of

_SMALL_BYTES = 1 << 20


class KeptBuffers:
    """Copies of a model's buffers as they were after the last step.

    After each step, all small buffers are copied, and large buffers, such as masks, if their version counter
    has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._locations = model, buffer_locations(model)
        live = self._live()
        self._copies = {name: buffer.clone() for name, buffer in live.items()}
        self._versions = {n: version_of(buffer) for n, buffer in live.items() if buffer.nbytes > _SMALL_BYTES}

    def keep(self) -> None:
        changed = {
            name: buffer
            for name, buffer in self._live().items()
            if name not in self._versions or version_of(buffer) != self._versions[name]
        }
        self._versions |= {name: version_of(changed[name]) for name in self._versions.keys() & changed}
        for name, buffer in changed.items():
            if buffer.shape != self._copies[name].shape:
                self._copies[name] = torch.empty_like(buffer)
        if changed:
            foreach_copy([self._copies[name] for name in changed], list(changed.values()))

    def kept(self) -> Mapping[str, Tensor]:
        """Return the copies, by their names in the model.

        Raises:
            UserError: if a large buffer was changed without updating its version counter, for example through
                numpy(), or if a forward pass registered or removed a buffer.
        """
        if {name for name, _ in named_buffers(self._model)} != self._locations.keys():
            raise UserError("a forward pass has registered or removed buffers")
        live = self._live()
        for name, version in self._versions.items():
            if version_of(live[name]) == version and not same_bits(live[name], self._copies[name]):
                raise UserError(
                    f"the buffer {name} was changed without an update of its version counter, for example "
                    "through numpy()"
                )
        return self._copies

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the kept values back to the buffers. Raises the errors of `kept`."""
        for name, value in self.kept().items():
            getattr(*self._locations[name]).copy_(value)

    def _live(self) -> dict[str, Tensor]:
        return {name: getattr(*location).detach() for name, location in self._locations.items()}
