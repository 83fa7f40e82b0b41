"""Measure the store calls per second and the CPU time of host leaders in a healthy run on many hosts.

A leader is the rank that reports for its host. All leaders are threads of this process, which also runs the
store, so the CPU time per leader is an upper bound. Each host has one rank, which makes a step every --step
seconds.

    python -m benchmarks.store_calls [--hosts 64] [--step 3] [--seconds 20]
"""

import argparse
import os
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.failures.diagnosis import Observed
from trainer.failures.host_reports import HostReports

CALLS = Counter[str]()


class CountingStore:
    """Counts the calls of a store; a call with several keys counts once."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            CALLS[name] += 1
            return real(*arguments)

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--step", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--after", type=float, default=30.0, help="seconds without progress after which a rank is suspected"
    )
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> Any:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))
        return CountingStore(dist.PrefixStore("watch", own))

    ranks = [Observed(host, host, f"node{host}", 7) for host in range(options.hosts)]
    leaders = [HostReports(connect, own.host, [r for r in ranks if r is not own]) for own in ranks]

    def run_for(seconds: float) -> None:
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            eager = time.monotonic() % options.step > options.after
            for leader, own in zip(leaders, ranks, strict=True):
                leader.set_own([own], eager=eager)
            time.sleep(0.2)

    run_for(5)
    CALLS.clear()
    start, cpu = time.monotonic(), time.process_time()
    run_for(options.seconds)
    wall, used = time.monotonic() - start, time.process_time() - cpu
    total = sum(CALLS.values()) / wall
    print(
        f"{options.hosts} hosts, steps of {options.step:g} s: {total:.0f} calls/s, "
        f"{total / options.hosts:.2f} per host; {1e2 * used / wall / options.hosts:.3f} % of a core per host",
        flush=True,
    )
    os._exit(0)  # the leaders' threads may be blocked in calls of the store


if __name__ == "__main__":
    main()
