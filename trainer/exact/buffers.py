"""Buffers that a forward pass changes, such as running statistics: the mean over chunks.

Whole numbers, such as a count of batches, have no mean: every chunk must leave the same ones.
"""

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import sum_over_ranks
from trainer.errors import UserError
from trainer.exact.digits import from_digits, to_digits
from trainer.model.plain_names import named_buffers, places_of_buffers
from trainer.tensors.bits import same_bits
from trainer.torch_private import version_of

_BLOCK = 1 << 12  # numbers of all chunks at once, since each takes some 50 times its memory


class ChunkBuffers:
    """Each chunk starts from the buffers at the step's beginning; afterwards they are the mean over chunks.

    Which buffers change is learned in the dry run, by their bits: torch counts no version of what is
    written through ``.data``, by NumPy or by a batch norm's kernel. Later the versions are looked at.

    Args:
        model: unwrapped; its buffers may be replaced by others of the same size.
        num_chunks: of a step, over all ranks.
    """

    def __init__(self, model: nn.Module, num_chunks: int) -> None:
        self._model, self._num_chunks = model, num_chunks
        self._places = places_of_buffers(model)
        self._names = list(self._places)
        self._changing: list[str] | None = None
        self._begin: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._changed: set[str] = set()
        self._made: list[dict[str, Tensor]] = []  # by this rank's chunks

    def start_chunk(self) -> None:
        """Called before each chunk's forward pass."""
        if not self._made:
            self._begin = self._copies()
        else:
            with torch.no_grad():
                for name, value in self._begin.items():
                    self._buffer(name).copy_(value)
        self._seen = {name: (now := self._buffer(name), version_of(now)) for name in self._names}

    def end_chunk(self) -> None:
        """Called after each chunk's backward pass, which may compute the forward pass again."""
        for name, (before, version) in self._seen.items():
            now = self._buffer(name)
            if now is not before or version_of(now) != version:
                self._changed.add(name)
        if self._changing is None:
            self._changed |= {n for n, begin in self._begin.items() if not same_bits(self._buffer(n), begin)}
        self._made.append(self._copies())

    def finish(self) -> None:
        """Called after the last chunk of a step (a collective, if any buffer changes).

        Raises:
            UserError: chunks disagree in a buffer of integers, a buffer changed that did not before, or the
                step made one.
        """
        made, self._made = self._made, []
        if late := {name for name, _ in named_buffers(self._model)} - self._places.keys():
            raise UserError(
                f"train.exact: a step made the buffer {min(late)}, without a mean over chunks; register it "
                "in __init__"
            )
        if not self._names:
            return
        if self._changing is None:
            self._changing = self._changed_anywhere()
        elif new := self._changed.difference(self._changing):
            raise UserError(
                f"train.exact: the buffer {min(new)} changes, but did not in the dry run before the first "
                "step, so it was not averaged; change it in each forward pass, or never"
            )
        if self._changing:
            self._set_means(self._changing, made)

    def _changed_anywhere(self) -> list[str]:
        """The buffers that some rank has changed (a collective)."""
        flags = [float(name in self._changed) for name in self._names]
        everywhere = sum_over_ranks(torch.tensor(flags, device=self._buffer(self._names[0]).device)).tolist()
        return [name for name, flag in zip(self._names, everywhere, strict=True) if flag]

    @torch.no_grad()
    def _set_means(self, names: list[str], made: list[dict[str, Tensor]]) -> None:
        """Set the means over all ranks' chunks, of which this rank has made these (a collective).

        BufferCheck compares whole numbers with those of other ranks.
        """
        wholes = [name for name in names if not self._buffer(name).is_floating_point()]
        differ = [(torch.stack([chunk[name] for chunk in made]) != made[0][name]).any() for name in wholes]
        if differ and torch.stack(differ).any():  # read once, since a GPU is waited for
            name = next(name for name, differs in zip(wholes, differ, strict=True) if differs)
            raise UserError(
                f"train.exact: passes leave different values in {name}, a buffer of "
                f"{self._buffer(name).dtype}, and whole numbers have no mean; set train.exact=null"
            )
        if not (floats := [name for name in names if name not in wholes]):
            return
        rows = [torch.cat([chunk[name].double().flatten() for name in floats]) for chunk in made]
        digits = torch.cat([to_digits(part) for part in torch.stack(rows).split(_BLOCK, 1)], 1)
        means = from_digits(sum_over_ranks(digits)) / self._num_chunks
        buffers = [self._buffer(name) for name in floats]
        for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _copies(self) -> dict[str, Tensor]:
        """Of the buffers that change; of all, as long as these are not known."""
        names = self._names if self._changing is None else self._changing
        return {name: self._buffer(name).clone() for name in names}

    def _buffer(self, name: str) -> Tensor:
        return getattr(*self._places[name])
