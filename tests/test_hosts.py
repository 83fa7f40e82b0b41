"""The hosts of network tests: real links, with their stated rate."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.hosts import hosts
from tests.ranks import run_ranks

pytestmark = pytest.mark.netns


def _send(num_bytes: int) -> float:
    data = torch.ones(num_bytes, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
    dist.barrier()
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_link_has_its_rate() -> None:
    with hosts(2, rate="200mbit") as (source, target):
        sent, received = source.counters()[0], target.counters()[1]
        seconds = max(run_ranks(_send, 2, 10_000_000, hosts=[source, target]))
        assert 80e6 / seconds < 205e6  # a busy machine may be slower than its link, never faster
        for count in (source.counters()[0] - sent, target.counters()[1] - received):
            assert 10_000_000 < count < 10_800_000


def wait_until_in(namespace: str, process: subprocess.Popen[bytes]) -> None:
    """It starts outside, like `ip netns exec`."""
    while Path(f"/proc/{process.pid}/ns/net").stat().st_ino != Path("/run/netns", namespace).stat().st_ino:
        time.sleep(0.01)


def test_nothing_is_left_after_a_failure() -> None:
    with pytest.raises(KeyError), hosts(1) as (host,):
        process = host.popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        wait_until_in(host.name, process)
        raise KeyError
    assert process.wait(60) == -9
    assert not Path(host.namespace_path).exists()
