"""Buffers that a forward pass changes, such as running statistics: the mean over leaves."""

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import sum_over_ranks
from trainer.errors import UserError
from trainer.exact.digits import from_digits, to_digits
from trainer.local_shard import same_bits
from trainer.turns import Turns

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
        self._places = [
            (f"{prefix}.{name}".lstrip("."), module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._changing: list[int] | None = None  # numbers of places
        self._begin: dict[int, Tensor] = {}
        self._still: dict[int, Tensor] = {}  # copies of those that do not change, compared in turns
        self._turns = Turns(len(self._places))
        self._seen: dict[int, tuple[Tensor, int]] = {}
        self._changed: set[int] = set()
        self._made: list[list[Tensor]] = []  # by this rank's leaves

    def begin_leaf(self) -> None:
        """Called before each leaf's forward pass."""
        if not self._made:
            self._begin = {place: self._buffer(place).clone() for place in self._followed()}
        else:
            self._restore()
        self._seen = {place: (now := self._buffer(place), now._version) for place in range(len(self._places))}

    def end_leaf(self) -> None:
        """Called after each leaf's backward pass, which may compute the forward pass again."""
        for place, (before, version) in self._seen.items():
            now = self._buffer(place)
            if now is not before or now._version != version:
                self._changed.add(place)
        if self._changing is None:
            self._changed |= {
                place for place, begin in self._begin.items() if not same_bits(self._buffer(place), begin)
            }
        self._made.append([self._buffer(place).clone() for place in self._followed()])

    def finish(self) -> None:
        """Called after the last leaf of a step (a collective, if any buffer changes).

        Raises:
            UserError: leaves disagree in a buffer of integers, a buffer changed that did not before, or the
                step made one.
        """
        followed, made = self._followed(), self._made
        self._made = []
        known = {name for name, _, _ in self._places}
        if late := {name for name, _ in self._model.named_buffers()} - known:
            raise UserError(
                f"train.exact: a step made the buffer {min(late)}, without a mean over leaves; register it "
                "in __init__"
            )
        for place in self._turns.next():
            if place in self._still and not same_bits(self._buffer(place), self._still[place]):
                self._changed.add(place)
        if self._changing is None:
            flags = torch.zeros(len(self._places), device=self._device())
            flags[sorted(self._changed)] = 1
            changing = sum_over_ranks(flags).nonzero().flatten().tolist() if self._places else []
            self._changing = sorted(changing, key=lambda place: not self._buffer(place).is_floating_point())
            self._still = {p: was for p, was in self._begin.items() if p not in changing}
        elif new := self._changed - set(self._changing):
            raise UserError(
                f"train.exact: the buffer {self._places[min(new)][0]} changed since the first step of this "
                "start, but not in it, so it was not averaged; change it in each forward pass, or never"
            )
        if not self._changing:
            return
        for name in (self._places[place][0] for place in self._changing if self._buffer(place).is_complex()):
            raise UserError(
                f"train.exact: {name}, a buffer of complex numbers, changes; keep it in two real ones"
            )
        places = self._changing
        self._set_means(places, [[leaf[followed.index(place)] for place in places] for leaf in made])

    def _set_means(self, places: list[int], made: list[list[Tensor]]) -> None:
        """Set the means over all ranks' leaves, each of which has made values of `places` (a collective)."""
        rows = torch.stack([torch.cat([_flat(value) for value in leaf]) for leaf in made])
        num_floats = sum(value.numel() for value in made[0] if value.is_floating_point())
        numbers = torch.cat([rows, rows[:, num_floats:].square()], 1)
        digits = torch.cat([to_digits(part) for part in numbers.split(_CHUNK, 1)], 1)
        sums, squares = from_digits(sum_over_ranks(digits)).tensor_split([rows.shape[1]])
        # n numbers are equal if n times the sum of their squares is the square of their sum, and only then.
        differ = squares * self._num_leaves != sums[num_floats:].square()
        begin = 0
        for place, value in zip(places, made[0], strict=True):
            end = begin + len(_flat(value))
            if value.is_floating_point():
                with torch.no_grad():
                    self._buffer(place).copy_((sums[begin:end] / self._num_leaves).view(value.shape))
            elif differ[begin - num_floats : end - num_floats].any():
                raise UserError(
                    f"train.exact: leaves leave {self._places[place][0]}, a buffer of {value.dtype}, with "
                    "other values, and whole numbers have no mean; set train.exact=null"
                )
            begin = end

    def _restore(self) -> None:
        with torch.no_grad():
            for place, value in self._begin.items():
                self._buffer(place).copy_(value)

    def _followed(self) -> list[int]:
        return list(range(len(self._places))) if self._changing is None else self._changing

    def _buffer(self, place: int) -> Tensor:
        _, module, name = self._places[place]
        return module.get_buffer(name)

    def _device(self) -> torch.device:
        return self._buffer(0).device if self._places else torch.device("cpu")


def _flat(buffer: Tensor) -> Tensor:
    """Its numbers as float64; of whole numbers their bytes, since no float64 is 2**53 + 1."""
    row = buffer.detach().contiguous().reshape(-1)
    return (row if row.is_floating_point() else row.view(torch.uint8)).double()
