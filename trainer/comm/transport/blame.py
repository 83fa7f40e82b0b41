"""Which rank to blame when communication stops: each rank blames a neighbour, one link in the chain of waits.

When one rank of a ring hangs, all the others time out together, each waiting for its own neighbour; when
one dies, they lose their neighbours one by one. The chain ends at the rank that caused the stop, which blames
none; trainer.faults.verdict collects all ranks' reports and follows it. Nothing here asks other ranks, since
the store may be gone, too.
"""


class PeerError(Exception):
    """A neighbour in the schedule did not do its part.

    The message names the peer, what this rank waited for it to do, and for how long.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"rank {peer} {reason}")
        self.peer, self.reason = peer, reason

    @classmethod
    def silent_for(cls, peer: int, timeout_s: float, due: str) -> "PeerError":
        return cls(peer, f"did not answer within {timeout_s:g} s: it was due {due}")

    @classmethod
    def hung_up(cls, peer: int, how: str, due: str, waited_s: float) -> "PeerError":
        return cls(peer, f"{how} {waited_s:.1f} s into the wait for it {due}")


class CommError(RuntimeError):
    """An all-reduce that cannot be finished. `peer` is the rank that this one waited for."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer
