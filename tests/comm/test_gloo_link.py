"""An error during a wait for a peer is not always the peer's."""

import signal
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import RECEIVED, GlooLink


def test_a_data_worker_that_is_killed_meanwhile_is_no_fault_of_the_peer() -> None:
    """torch's handler raises anywhere in the main thread: the peer used to be blamed, and killed."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    work: Any = SimpleNamespace(wait=lambda timeout: signal.raise_signal(signal.SIGUSR1))
    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            GlooLink(None, 1, 10.0).wait(work, RECEIVED)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_what_is_raised_in_c_is_of_the_peer() -> None:
    work: Any = SimpleNamespace(wait=partial(dist.HashStore().wait, ["what nobody sets"]))
    with pytest.raises(PeerError, match="rank 1 is gone"):
        GlooLink(None, 1, 0.01).wait(work, RECEIVED)  # type: ignore[arg-type]
