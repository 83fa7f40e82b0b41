"""Messages between two ranks over a gloo group, with deadlines that name the peer."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.comm.transport.blame import PeerError
from trainer.errors import first_line

SENT, RECEIVED = (
    "to take a message",
    "to send a message",
)  # what the peer must do for a wait to end


class GlooLink:
    """Both directions between this rank and one peer; tensors are contiguous and on the CPU."""

    def __init__(self, group: dist.ProcessGroup, peer: int, timeout_s: float) -> None:
        self.peer = peer
        self._group, self._timeout = group, timedelta(seconds=timeout_s)

    def send(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Begin to send; `tensor` must not change until `wait` has returned."""
        try:
            return self._group.send([tensor], self.peer, tag)
        except RuntimeError as error:
            raise self._lost(error, SENT, 0.0) from error

    def receive(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Begin to receive into `tensor`, which must have the size of the message sent under the tag."""
        try:
            return self._group.recv([tensor], self.peer, tag)
        except RuntimeError as error:
            raise self._lost(error, RECEIVED, 0.0) from error

    def wait(self, work: dist.Work, due: str) -> None:
        """Wait for a send (`due` is SENT) or a receive (RECEIVED) of this link to be done.

        Raises:
            PeerError: the peer is gone, or silent for `timeout_s`.
        """
        began = time.perf_counter()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, due, time.perf_counter() - began) from error

    def _lost(self, error: RuntimeError, due: str, waited_s: float) -> PeerError:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            # Raised in Python by a signal handler, such as torch's for a killed data worker.
            raise error
        if "imed out" in str(error):  # gloo has no separate error class
            return PeerError.silent_for(self.peer, self._timeout.total_seconds(), due)
        return PeerError.hung_up(self.peer, f"is gone (gloo: {first_line(error)})", due, waited_s)


class GlooLinks:
    """The links of this rank over a gloo group of all ranks that has no other user.

    Args:
        timeout_s: the longest wait for one peer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = 600.0) -> None:
        self.rank, self.timeout_s, self._group = dist.get_rank(group), timeout_s, group

    def to(self, peer: int) -> GlooLink:
        return GlooLink(self._group, peer, self.timeout_s)

    def exchange(self, text: str) -> list[str]:
        """Gather the `text` of every rank, by rank (a collective)."""
        texts = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, text, group=self._group)
        return texts
