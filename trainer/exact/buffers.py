"""Average the buffers that forward passes change, such as running statistics, over the chunks of a step.

Integer buffers, such as a count of batches, are not averaged and must be equal after every chunk.
"""

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import sum_over_ranks
from trainer.errors import UserError
from trainer.exact.digits import from_digits, to_digits
from trainer.model.plain_names import buffer_locations, named_buffers
from trainer.tensors.bits import same_bits
from trainer.torch_private import version_of

_BLOCK = 1 << 12  # elements to average at once; averaging takes 50 times the memory of an element


class ChunkBuffers:
    """Starts each chunk from the same buffers, and sets them to the mean over chunks at the end of a step.

    The dry run finds the buffers that change, by comparing bits, because torch does not count writes through
    ``.data``, NumPy or the kernel of a batch norm as new versions. Later steps compare versions.
    """

    def __init__(self, model: nn.Module, num_chunks: int) -> None:
        self._model, self._num_chunks = model, num_chunks
        self._locations = buffer_locations(model)
        self._names = list(self._locations)
        self._changing: list[str] | None = None
        self._initial: dict[str, Tensor] = {}  # at the start of the step
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._changed: set[str] = set()
        self._results: list[dict[str, Tensor]] = []  # after each of this rank's chunks

    def start_chunk(self) -> None:
        """Restore the initial buffers of the step; called before each chunk's forward pass."""
        if not self._results:
            self._initial = self._copies()
        else:
            self._restore()
        self._seen = {name: (buffer := self._buffer(name), version_of(buffer)) for name in self._names}

    def end_chunk(self) -> None:
        """Record changed buffers after a chunk's backward pass, which may recompute the forward pass."""
        for name, (before, version) in self._seen.items():
            buffer = self._buffer(name)
            if buffer is not before or version_of(buffer) != version:
                self._changed.add(name)
        if self._changing is None:
            self._changed |= {n for n, old in self._initial.items() if not same_bits(self._buffer(n), old)}
        self._results.append(self._copies())

    def discard(self) -> None:
        """Restore the buffers to their values before the first chunk, and discard the chunks so far."""
        if self._results:
            self._restore()
            self._results = []

    def finish(self) -> None:
        """Set the buffers that change to their means, after the last chunk of a step (a collective).

        Raises:
            UserError: the step created a buffer, changed a buffer that the dry run did not change, or left
                different integers in a buffer.
        """
        results, self._results = self._results, []
        if new := {name for name, _ in named_buffers(self._model)} - self._locations.keys():
            raise UserError(
                f"train.exact: a step created the buffer {min(new)}, which is not averaged over chunks; "
                "register it in __init__"
            )
        if not self._names:
            return
        if self._changing is None:
            self._changing = self._changed_anywhere()
        elif new := self._changed.difference(self._changing):
            raise UserError(
                f"train.exact: the buffer {min(new)} changes, but did not change in the dry run before the "
                "first step, so it was not averaged; change it in every forward pass, or in none"
            )
        if self._changing:
            self._set_means(self._changing, results)

    def _changed_anywhere(self) -> list[str]:
        flags = [float(name in self._changed) for name in self._names]
        everywhere = sum_over_ranks(torch.tensor(flags, device=self._buffer(self._names[0]).device)).tolist()
        return [name for name, flag in zip(self._names, everywhere, strict=True) if flag]

    @torch.no_grad()
    def _set_means(self, names: list[str], results: list[dict[str, Tensor]]) -> None:
        """Set buffers to their means over the chunks of all ranks, given this rank's results (a collective).

        Integers are compared within this rank; `BufferCheck` compares them across ranks.
        """
        integers = [name for name in names if not self._buffer(name).is_floating_point()]
        differ = [(torch.stack([c[name] for c in results]) != results[0][name]).any() for name in integers]
        if differ and torch.stack(differ).any():  # one comparison, because it waits for a GPU
            name = next(name for name, differs in zip(integers, differ, strict=True) if differs)
            raise UserError(
                f"train.exact: the passes of a step write different values to {name}, a buffer of "
                f"{self._buffer(name).dtype}, and integers cannot be averaged; set train.exact=null"
            )
        if not (floats := [name for name in names if name not in integers]):
            return
        rows = [torch.cat([chunk[name].double().flatten() for name in floats]) for chunk in results]
        digits = torch.cat([to_digits(part) for part in torch.stack(rows).split(_BLOCK, 1)], 1)
        means = from_digits(sum_over_ranks(digits)) / self._num_chunks
        buffers = [self._buffer(name) for name in floats]
        for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    @torch.no_grad()
    def _restore(self) -> None:
        for name, value in self._initial.items():
            self._buffer(name).copy_(value)

    def _copies(self) -> dict[str, Tensor]:
        names = self._names if self._changing is None else self._changing
        return {name: self._buffer(name).clone() for name in names}

    def _buffer(self, name: str) -> Tensor:
        return getattr(*self._locations[name])
