"""The times of the timeline add up, the late rank is named, and the profiler shows the buckets."""

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.comm.test_ddp_hook import network
from tests.ranks import run_ranks
from trainer.comm.ddp_hook import attach
from trainer.comm.timeline import BucketRecord, PassSum


def record(ready: float, start: float, end: float) -> BucketRecord:
    return BucketRecord(0, 4, ready, start, end)


def test_overlapped_and_exposed_add_up() -> None:
    sums = PassSum()
    sums.add([record(0, 0, 4), record(3, 4, 8)])  # the last gradient at 3: 3 of 8 seconds are overlapped
    assert sums.means_ms() == {"total_ms": 8000, "overlapped_ms": 3000, "exposed_ms": 5000}
    sums.add([record(0, 0, 2), record(1, 1, 3), record(10, 10, 11)])  # two at the same time count once
    assert (sums.count, sums.total_s, sums.exposed_s) == (2, 8 + 4, 5 + 1)


def sleep_before_backward(algorithm: str, hosts: list[int], sleeper: int) -> dict[str, Any]:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    hook = attach(model, algorithm, hosts=hosts, timeout_s=20.0)
    store, arrive = dist.distributed_c10d._get_default_store(), hook.timeline.arrive

    def tell(index: int, num_bytes: int, is_last: bool) -> BucketRecord:
        noted = arrive(index, num_bytes, is_last)
        store.add("passes", int(is_last))
        return noted

    hook.timeline.arrive = tell  # type: ignore[method-assign]
    found: list[dict[str, float]] = []
    for late in (False, False, False, True):
        loss = model(torch.randn(8, 20)).sum()
        dist.barrier()
        began = time.perf_counter()
        if late and dist.get_rank() == sleeper:
            while store.add("passes", 0) < 4 * len(hosts) - 1:  # until all others have arrived
                time.sleep(0.01)
            time.sleep(0.3)
        loss.backward()
        pass_ms = 1e3 * (time.perf_counter() - began)
        found.append(hook.timeline.metrics())
    (figure,), text = hook.timeline.plots().values(), hook.timeline.summary()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    hook.close()
    return {
        "before": found[:3],
        "late": found[3],
        "typical": hook.timeline.measured()["timeline"]["buckets"],
        "summary": text,
        "labels": labels,
        "pass_ms": pass_ms,
    }


@pytest.mark.parametrize("algorithm", [pytest.param("native", marks=pytest.mark.slow), "ring"])
def test_a_rank_that_sleeps_before_its_backward_pass_is_named(algorithm: str) -> None:
    sleeper = 2
    results = run_ranks(sleep_before_backward, 3, algorithm, [0, 0, 1], sleeper)
    for rank, found in enumerate(results):
        late = found["late"]
        assert late["usage/comm/last_rank"] == sleeper
        # It started to sleep after the other ranks had arrived.
        assert 100 < late["usage/comm/arrival_skew_ms"] < 2 * max(result["pass_ms"] for result in results)
        assert (
            min(before["usage/comm/arrival_skew_ms"] for before in found["before"])
            < late["usage/comm/arrival_skew_ms"]
        )
        assert late["usage/comm/overlapped_ms"] + late["usage/comm/exposed_ms"] == pytest.approx(
            late["usage/comm/total_ms"]
        )
        early = [bucket["early_ms"] for bucket in found["typical"]]
        assert early == sorted(early, reverse=True) and early[0] > early[-1] == 0
        num_bytes = sum(bucket["bytes"] for bucket in found["typical"])
        assert num_bytes / 1e6 == pytest.approx(late["usage/comm/megabytes"])
        if rank != sleeper:  # the all-reduce looks long on the other ranks, which are not to blame
            assert late["usage/comm/total_ms"] > 100
        assert any(f"rank {sleeper} ready, " in label for label in found["labels"])
        assert re.search(r"\nslowest rank: \d \(last in \d of 4 measured steps\)$", found["summary"])


def profile() -> list[str]:
    model = DistributedDataParallel(network())
    hook = attach(model, "ring", hosts=[0, 0])
    with torch.profiler.profile() as profiler:
        model(torch.randn(8, 20)).sum().backward()
    hook.close()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.slow
def test_the_profiler_shows_each_bucket() -> None:
    for names in run_ranks(profile, 2):
        assert any(name.startswith("all-reduce bucket 0") for name in names), names
