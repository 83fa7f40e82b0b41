"""How ranks act together on files: what goes wrong on one is told to all before anyone raises."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as torch_dist

from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.files.untrusted import reason

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Agreement:
    """All ranks, in a gloo group of their own where they may wait ``timeout_s``. All is collective."""

    def __init__(self, dist: Dist, timeout_s: float) -> None:
        # Its making waits for all ranks as long as its members may wait: first see that they are there.
        torch_dist.barrier()
        group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.group = cast(torch_dist.ProcessGroup, group)
        self.rank, self.world_size = dist.rank, dist.world_size

    def gather(self, value: _T) -> list[_T]:
        """Every rank's ``value``, by rank, on every rank."""
        gathered: list[Any] = [None] * self.world_size
        torch_dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def on_main(self, action: Callable[[], _T]) -> _T:
        """Rank 0's result of ``action`` on every rank; its error, as a UserError, likewise."""
        box = [_attempt(action) if self.rank == 0 else None]
        torch_dist.broadcast_object_list(box, src=0, group=self.group)
        assert box[0] is not None
        value, error = box[0]
        if error is not None:
            raise UserError(error)
        return cast(_T, value)

    def everywhere(self, action: Callable[[], _T]) -> _T:
        """This rank's result of ``action``, once all have one; one rank's error is a UserError on all."""
        value, error = _attempt(action)
        errors = self.gather(error)
        failed = {rank: message for rank, message in enumerate(errors) if message is not None}
        if failed:
            rank, first = next(iter(failed.items()))
            raise UserError(first if all(message == first for message in errors) else f"rank {rank}: {first}")
        return cast(_T, value)


class Alone(Agreement):
    """A process without a process group, which has nobody to agree with."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.group = cast(torch_dist.ProcessGroup, None)  # by which whoever reads knows that it reads alone

    def gather(self, value: _T) -> list[_T]:
        return [value]

    def on_main(self, action: Callable[[], _T]) -> _T:
        return self.everywhere(action)


def _attempt(action: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """The result of ``action`` or its error in words."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)
    except Exception as error:  # whatever it is: peers are waiting to hear of it
        log.debug("while reading or writing a checkpoint", exc_info=True)
        return None, f"{type(error).__name__}: {reason(error)}"
