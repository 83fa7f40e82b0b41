"""How ranks act together: an error of one rank is sent to all before any raises it."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as torch_dist

from trainer.distributed.collectives import gloo_group
from trainer.errors import UserError
from trainer.files.untrusted import reason

if TYPE_CHECKING:
    from trainer.distributed.process_group import Dist

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def compare_across_ranks(
    facts: Mapping[str, Any],
    dist: "Dist",
    way_out: str = "start every host with the same command, code and data",
) -> None:
    """Raise if `facts` (name to printable value) differ between ranks (a collective).

    Raises:
        UserError: names the first rank that differs from rank 0, the key and both values; on every rank.
    """
    reference, *others = gather_objects(dict(facts))
    for rank, theirs in enumerate(others, start=1):
        for key in sorted(reference.keys() | theirs.keys()):
            if reference.get(key) != theirs.get(key):
                raise UserError(
                    f"{dist.describe(rank)} differs from rank 0 in {key}: {theirs.get(key)!r} against "
                    f"{reference.get(key)!r}; {way_out}"
                )


def gather_objects(value: _T, group: torch_dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's `value`, by rank, on every rank (a collective of `group`, or of all)."""
    gathered: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_main(action: Callable[[], _T], dist: "Dist") -> _T:
    """Call `action` on rank 0 only, and return its result on every rank (a collective).

    Raises:
        UserError: the one that `action` raised, on every rank. Any other error is a fault of rank 0 only.
    """
    return _from_main(action, UserError, dist.rank, None)


class Agreement:
    """All ranks acting on files: any error becomes a UserError. All methods are collectives.

    They use a separate gloo group, with a timeout of `timeout_s`.
    """

    def __init__(self, dist: "Dist", timeout_s: float) -> None:
        # Creating the group may wait for `timeout_s`, too: first check that all ranks are there.
        torch_dist.barrier()
        self.group = gloo_group(timeout_s)
        self.rank, self.world_size = dist.rank, dist.world_size

    def gather(self, value: _T) -> list[_T]:
        """Every rank's `value`, by rank, on every rank."""
        return gather_objects(value, self.group)

    def on_main(self, action: Callable[[], _T]) -> _T:
        """Rank 0's result of `action` on every rank; its error is a UserError on every rank."""
        return _from_main(action, Exception, self.rank, self.group)

    def everywhere(self, action: Callable[[], _T]) -> _T:
        """This rank's result of `action`, once all have one; an error of one rank is a UserError on all."""
        value, error = _attempt(action, Exception)
        errors = self.gather(error)
        failed = {rank: message for rank, message in enumerate(errors) if message is not None}
        if failed:
            rank, first = next(iter(failed.items()))
            raise UserError(first if all(message == first for message in errors) else f"rank {rank}: {first}")
        return cast(_T, value)


class Alone(Agreement):
    """A process without a process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.group = cast(torch_dist.ProcessGroup, None)  # tells a reader that it reads alone

    def gather(self, value: _T) -> list[_T]:
        return [value]

    def on_main(self, action: Callable[[], _T]) -> _T:
        return self.everywhere(action)


def _from_main(
    action: Callable[[], _T],
    expected: type[Exception],
    rank: int,
    group: torch_dist.ProcessGroup | None,
) -> _T:
    box = [_attempt(action, expected) if rank == 0 else None]
    torch_dist.broadcast_object_list(box, src=0, group=group)
    assert box[0] is not None
    value, error = box[0]
    if error is not None:
        raise UserError(error)
    return cast(_T, value)


def _attempt(action: Callable[[], _T], expected: type[Exception]) -> tuple[_T | None, str | None]:
    """The result of `action`, or the message of an `expected` error."""
    try:
        return action(), None
    except expected as error:
        if isinstance(error, UserError):
            return None, str(error)
        log.debug("while reading or writing a checkpoint", exc_info=True)
        return None, f"{type(error).__name__}: {reason(error)}"
