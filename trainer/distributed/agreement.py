"""Agreement between ranks: an error on one rank is raised on all ranks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from trainer.distributed.collectives import gloo_group
from trainer.distributed.ranks import Ranks
from trainer.errors import NonFiniteError, RetryableError, RunEndError, UserError, kind_of
from trainer.files.untrusted import reason

_T = TypeVar("_T")
_Report = TypeVar("_Report")


class _Failure(NamedTuple):
    """An error that an action raised, in a form that can be sent to all ranks."""

    kind: type[RunEndError]
    message: str
    ranks: tuple[int, ...] = ()


def compare_across_ranks(
    facts: Mapping[str, Any],
    ranks: Ranks,
    way_out: str = "start every host with the same command, code and data",
) -> None:
    """Check that `facts`, printable values by name, are equal on all ranks (a collective).

    Raises:
        UserError: on every rank; names the first rank that differs from rank 0, with the key and both values.
    """
    if not differs(sorted(facts.items())):
        return
    reference, *others = gather_objects(dict(facts))
    for rank, other in enumerate(others, start=1):
        for key in sorted(reference.keys() | other.keys()):
            if reference.get(key) != other.get(key):
                raise UserError(
                    f"{ranks.describe(rank)} differs from rank 0 in {key}: {other.get(key)!r} instead of "
                    f"{reference.get(key)!r}; {way_out}"
                )


def differs(value: Any) -> bool:
    """Return whether `repr(value)` differs between ranks (a collective); only its hash is sent."""
    return len(set(gather_objects(hashlib.blake2b(repr(value).encode(), digest_size=16).digest()))) > 1


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the `value` of every rank, in rank order, on every rank of `group` (a collective)."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_main(action: Callable[[], _T], ranks: Ranks) -> _T:
    """Call `action` on rank 0, and return its result on every rank (a collective).

    Raises:
        UserError, RetryableError: on every rank, if `action` raised it. Other errors are raised on rank 0
            only.
    """
    return Agreement(ranks)._from_main(action, (UserError, RetryableError))


class Agreement:
    """Runs actions such as file operations, and raises an error that occurs on one rank on all ranks.

    All methods are collectives.

    Args:
        ranks: None in a process without other ranks.
        timeout_s: the timeout of a separate gloo group, which calls from a thread require; None uses the
            default group.
        in_time: whether operations of that group fail after `timeout_s` (see `gloo_group`).

    Raises:
        UserError: from each method, if the user must change something (see `kind_of`).
        RetryableError: from each method, for any other error, for example on a disk or in a store.
    """

    def __init__(
        self, ranks: Ranks | None = None, timeout_s: float | None = None, in_time: bool = False
    ) -> None:
        self.rank, self.world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        self.group: dist.ProcessGroup | None = None
        if timeout_s is not None:
            # Creating the group also waits for up to `timeout_s`: first check that all ranks are there.
            dist.barrier()
            self.group = gloo_group(timeout_s, in_time)

    def gather(self, value: _T) -> list[_T]:
        """Return the `value` of every rank, in rank order, on every rank."""
        return [value] if self.world_size == 1 else gather_objects(value, self.group)

    def on_main(self, action: Callable[[], _T]) -> _T:
        """Call `action` on rank 0, and return its result, or raise its error, on every rank."""
        return self._from_main(action, (Exception,))

    def everywhere(self, action: Callable[[], _T]) -> _T:
        """Call `action` on every rank, and return this rank's result, or raise the first error."""
        value, failure, cause = _attempt(action, (Exception,))
        _raise_first(self.gather(failure), cause)
        return cast(_T, value)

    def decide_on_rank0(self, report: Callable[[], _Report], decide: Callable[[list[_Report]], _T]) -> _T:
        """Call `decide` on rank 0 with the `report` of every rank, and return the decision on every rank.

        If a report raises an error, every rank raises it, and `decide` is not called.
        """
        own, failure, cause = _attempt(report, (Exception,))
        gathered: list[Any] = [(own, failure)] * self.world_size
        if self.world_size > 1:
            dist.gather_object((own, failure), gathered if self.rank == 0 else None, dst=0, group=self.group)

        def decision() -> _T:
            _raise_first([failure for _, failure in gathered], cause)
            return decide([own for own, _ in gathered])

        return self._from_main(decision, (Exception,), cause)

    def _from_main(
        self, action: Callable[[], _T], expected: tuple[type[Exception], ...], cause: Exception | None = None
    ) -> _T:
        """Return the result of rank 0's `action`, or raise its `expected` error, on every rank.

        Args:
            cause: this rank's error, if it may be the reason for the error of `action`.
        """
        box: list[Any] = [None]
        if self.rank == 0:
            value, failure, cause = _attempt(action, expected)
            box = [(value, failure)]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        value, failure = box[0]
        if failure is not None:
            raise failure.kind(failure.message, failure.ranks) from cause
        return cast(_T, value)


def _raise_first(failures: Sequence[_Failure | None], cause: Exception | None) -> None:
    for rank, first in enumerate(failures):
        if first is not None:
            message = first.message if all(other == first for other in failures) else None
            raise first.kind(message or f"rank {rank}: {first.message}", first.ranks) from cause


def _attempt(
    action: Callable[[], _T], expected: tuple[type[Exception], ...]
) -> tuple[_T | None, _Failure | None, Exception | None]:
    """Return the result of `action` or, after an `expected` error, a `_Failure` and the error."""
    try:
        return action(), None, None
    except expected as error:
        if isinstance(error, NonFiniteError):
            return None, _Failure(NonFiniteError, str(error), error.ranks), error
        is_complete = isinstance(error, UserError | RetryableError)
        message = str(error) if is_complete else f"{type(error).__name__}: {reason(error)}"
        return None, _Failure(kind_of(error), message), error
