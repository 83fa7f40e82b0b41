"""Checks of the sums of `train.exact`, for `train.verify_every`.

Integers are added without rounding. So the sum after a chunk minus the sum before it is exactly the
gradient that was added. And modulo 2**64, the elements that a rank receives have the same sum as the elements
that all ranks have sent to it, whatever the order of additions.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from trainer.tensors.bits import bit_hash

Segments = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Returns parameters, each with its integers in a sum."""


class SumChecks:
    """The interface of `LinearChecks`, for runs that do not verify gradients."""

    def attach(self, model: nn.Module) -> None:
        """Called once, after the parameters of the model are on their device and sharded."""

    def begin_step(self) -> None:
        """Discard the records of the previous step; called before the first chunk of a step."""

    def chunk(self) -> AbstractContextManager:
        """Return the context of one chunk."""
        return nullcontext()

    def adding(self, segments: Segments) -> AbstractContextManager:
        """Return the context in which all or part of a chunk's gradient is added to the sums `segments`."""
        return nullcontext()

    def sent(self, sums: Tensor) -> None:
        """Check the sums that this rank sends: (numel,), or (ranks, numel) with a row for each rank."""

    def received(self, sums: Tensor) -> None:
        """Check the sums that this rank has received."""


NO_CHECKS = SumChecks()


class LinearChecks(SumChecks):
    """Hashes the gradient of one of this rank's chunks, and compares what ranks send and receive.

    No method waits for the device.

    Attributes:
        observed: the index, among this rank's chunks, of the chunk to hash; None: hash no chunk.
        hashes: the hash of each parameter's gradient in this chunk, in the order of the model's parameters;
            replaced by each step.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._numbers: dict[Tensor, int] = {}
        self.observed: int | None = None
        self.begin_step()

    def attach(self, model: nn.Module) -> None:
        self._numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._device = next(model.parameters()).device

    def begin_step(self) -> None:
        self._chunk = 0
        self._is_hashing = False
        self.hashes = torch.empty(0, dtype=torch.int64)
        self._sent: list[Tensor] = []
        self._received: list[Tensor] = []  # by several threads

    @contextmanager
    def chunk(self) -> Iterator[None]:
        self._is_hashing = self._chunk == self.observed
        if self._is_hashing:
            self.hashes = torch.zeros(len(self._numbers), dtype=torch.int64, device=self._device)
        yield
        self._is_hashing = False
        self._chunk += 1

    @contextmanager
    def adding(self, segments: Segments) -> Iterator[None]:
        # Not a difference of hashes: any such hash of int64 misses two flips of the highest bit.
        before = [sums.clone() for _, sums in segments()] if self._is_hashing else []
        yield
        if before:
            for (parameter, sums), old in zip(segments(), before, strict=True):
                self.hashes[self._numbers[parameter]] += bit_hash(sums - old).to(self._device)

    def sent(self, sums: Tensor) -> None:
        self._sent.append(sums.sum(-1))

    def received(self, sums: Tensor) -> None:
        self._received.append(sums.sum())

    def balance(self) -> Tensor:
        """Return a tensor (ranks,), whose sum over ranks is 0 for each rank that received the right sums.

        Each element is the sum of what was sent to a rank minus the sum of what that rank has received. An
        even number of flips of the highest bit in one step is not detected.
        """
        balance = torch.zeros(self._world_size, dtype=torch.int64, device=self._device)
        for sums in self._sent:
            balance += sums.to(self._device)
        for sums in self._received:
            balance[self._rank] -= sums.to(self._device)
        return balance
