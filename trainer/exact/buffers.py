"""Buffers that a forward pass changes, such as running statistics: the mean over leaves."""

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import sum_over_ranks
from trainer.errors import UserError
from trainer.exact.digits import from_digits, to_digits
from trainer.exact.turns import Turns
from trainer.local_shard import same_bits

_CHUNK = 1 << 12  # numbers of all leaves at once, since each takes some 50 times its memory


class LeafBuffers:
    """Each leaf starts from the buffers at the step's beginning; afterwards they are the mean over leaves.

    Which buffers change is learned in the first step, by their bits: torch counts no version of what is
    written through ``.data``, by NumPy or by a batch norm's kernel.

    Args:
        model: unwrapped; its buffers may be replaced by others of the same size.
        num_leaves: of a step, over all ranks.
    """

    def __init__(self, model: nn.Module, num_leaves: int) -> None:
        self._model, self._num_leaves = model, num_leaves
        self._owners = {
            name: model.get_submodule(name.rpartition(".")[0])
            for name, _ in model.named_buffers(remove_duplicate=False)
        }
        self._names = list(self._owners)
        self._changing: list[str] | None = None
        self._begin: dict[str, Tensor] = {}
        self._still: dict[str, Tensor] = {}  # copies of those that do not change, compared in turns
        self._turns = Turns(len(self._names))
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._changed: set[str] = set()
        self._made: list[dict[str, Tensor]] = []  # by this rank's leaves

    def begin_leaf(self) -> None:
        """Called before each leaf's forward pass."""
        if not self._made:
            self._begin = self._copies()
        else:
            with torch.no_grad():
                for name, value in self._begin.items():
                    self._buffer(name).copy_(value)
        self._seen = {name: (now := self._buffer(name), now._version) for name in self._names}

    def end_leaf(self) -> None:
        """Called after each leaf's backward pass, which may compute the forward pass again."""
        for name, (before, version) in self._seen.items():
            now = self._buffer(name)
            if now is not before or now._version != version:
                self._changed.add(name)
        if self._changing is None:
            self._changed |= {n for n, begin in self._begin.items() if not same_bits(self._buffer(n), begin)}
        self._made.append(self._copies())

    def finish(self) -> None:
        """Called after the last leaf of a step (a collective, if any buffer changes).

        Raises:
            UserError: leaves disagree in a buffer of integers, a buffer changed that did not before, or the
                step made one.
        """
        made, self._made = self._made, []
        if late := {name for name, _ in self._model.named_buffers()} - self._owners.keys():
            raise UserError(
                f"train.exact: a step made the buffer {min(late)}, without a mean over leaves; register it "
                "in __init__"
            )
        if not self._names:
            return
        for name in (self._names[number] for number in self._turns.next()):
            if name in self._still and not same_bits(self._buffer(name), self._still[name]):
                self._changed.add(name)
        if self._changing is None:
            self._changing = self._changed_anywhere()
            self._still = {name: was for name, was in self._begin.items() if name not in self._changing}
        elif new := self._changed.difference(self._changing):
            raise UserError(
                f"train.exact: the buffer {min(new)} changed since the first step of this start, but not in "
                "it, so it was not averaged; change it in each forward pass, or never"
            )
        if self._changing:
            self._set_means(self._changing, made)

    def _changed_anywhere(self) -> list[str]:
        """The buffers that some rank has changed (a collective), those of whole numbers last.

        Raises:
            UserError: one is of complex numbers.
        """
        flags = [float(name in self._changed) for name in self._names]
        everywhere = sum_over_ranks(torch.tensor(flags, device=self._buffer(self._names[0]).device)).tolist()
        changed = [name for name, flag in zip(self._names, everywhere, strict=True) if flag]
        if unfit := [name for name in changed if self._buffer(name).is_complex()]:
            raise UserError(
                f"train.exact: {unfit[0]}, a buffer of complex numbers, changes; keep it in two real ones"
            )
        return sorted(changed, key=lambda name: not self._buffer(name).is_floating_point())

    def _set_means(self, names: list[str], made: list[dict[str, Tensor]]) -> None:
        """Set the means over all ranks' leaves, of which this rank has made these (a collective)."""
        rows = torch.stack([torch.cat([_flat(leaf[name]) for name in names]) for leaf in made])
        num_floats = sum(made[0][name].numel() for name in names if made[0][name].is_floating_point())
        numbers = torch.cat([rows, rows[:, num_floats:].square()], 1)
        digits = torch.cat([to_digits(part) for part in numbers.split(_CHUNK, 1)], 1)
        sums, squares = from_digits(sum_over_ranks(digits)).tensor_split([rows.shape[1]])
        # n numbers are equal if n times the sum of their squares is the square of their sum, and only then.
        differ = squares * self._num_leaves != sums[num_floats:].square()
        begin = 0
        for name in names:
            buffer, end = self._buffer(name), begin + len(_flat(made[0][name]))
            if buffer.is_floating_point():
                with torch.no_grad():
                    buffer.copy_((sums[begin:end] / self._num_leaves).view(buffer.shape))
            elif differ[begin - num_floats : end - num_floats].any():
                raise UserError(
                    f"train.exact: leaves leave {name}, a buffer of {buffer.dtype}, with other values, and "
                    "whole numbers have no mean; set train.exact=null"
                )
            begin = end

    def _copies(self) -> dict[str, Tensor]:
        """Of the buffers that change; of all, as long as these are not known."""
        names = self._names if self._changing is None else self._changing
        return {name: self._buffer(name).clone() for name in names}

    def _buffer(self, name: str) -> Tensor:
        return self._owners[name].get_buffer(name.rpartition(".")[2])


def _flat(buffer: Tensor) -> Tensor:
    """Its numbers as float64; of whole numbers their bytes, since no float64 is 2**53 + 1."""
    row = buffer.detach().contiguous().reshape(-1)
    return (row if row.is_floating_point() else row.view(torch.uint8)).double()
