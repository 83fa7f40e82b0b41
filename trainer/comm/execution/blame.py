"""Who is to blame when communication stops: the rank that everybody, directly or not, waits for."""

import time

import torch.distributed as dist


class PeerError(Exception):
    """A neighbour in the schedule did not do its part.

    `silent` tells one that let the deadline pass from one that is known to be gone or at fault. The message
    names the peer, what this rank waited for it to do, and for how long.
    """

    def __init__(self, peer: int, reason: str, silent: bool = False) -> None:
        super().__init__(f"rank {peer} {reason}")
        self.peer, self.reason, self.silent = peer, reason, silent

    @classmethod
    def silent_for(cls, peer: int, timeout_s: float, due: str) -> "PeerError":
        return cls(peer, f"did not answer within {timeout_s:g} s: it was due {due}", silent=True)

    @classmethod
    def hung_up(cls, peer: int, how: str, due: str, waited_s: float) -> "PeerError":
        return cls(peer, f"{how} {waited_s:.1f} s into the wait for it {due}")


class CommError(RuntimeError):
    """An all-reduce that cannot be finished. `peer` is the rank to look at first."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


def find_culprit(store: dist.Store, rank: int, error: PeerError) -> int:
    """Follow the waits from rank to rank, to the rank that blames nobody.

    When one rank of a ring hangs, all the others time out together, each waiting for its own neighbour; when
    one dies, they lose their neighbours one by one. So each rank writes down whom it blames, in the store,
    which needs no peer to answer. Who has not done so a moment later is the culprit. A store that is gone,
    with rank 0's process, ends the chain too.
    """
    blamed, seen = error.peer, {rank}
    # Deadlines pass at slightly different times; and gloo hangs up on a peer before that rank can write.
    deadline = time.monotonic() + (1.0 if error.silent else 0.2)
    try:
        store.set(f"blame/{rank}", str(blamed))
        while blamed not in seen:
            seen.add(blamed)
            while not store.check([f"blame/{blamed}"]):
                if time.monotonic() >= deadline:
                    return blamed
                time.sleep(0.02)
            blamed = int(store.get(f"blame/{blamed}"))
    except RuntimeError:
        pass
    return blamed
