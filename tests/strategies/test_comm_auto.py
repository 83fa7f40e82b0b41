"""comm=auto uses a schedule through shared memory if possible, and otherwise the backend's all-reduce."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.failures.test_ends import TINY
from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.comm.overlap import Worker
from trainer.comm.timeline import BucketRecord

WORDS = (
    *("model._target_=tests.strategies.test_comm_hook.Words", "~model.input_shape", "~model.hidden"),
    *("optim.momentum=0", "optim.weight_decay=0"),
)


class Complex(nn.Module):
    """A model with a parameter whose dtype schedules do not support."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.ones(6, dtype=torch.complex64)), nn.Linear(6, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head((rows * self.turn).real)


CASES = {
    (): "tree",
    ("comm.wire_dtype=bf16",): "native",
    ("comm.timeline=false",): "native",
    ("comm=native",): "native",
    ("comm=ring",): "ring",
    ("strategy=fsdp",): "native",
    WORDS: "native",
    (*TINY[1:], f"model._target_={__name__}.Complex"): "native",
}


def chosen(cases: Sequence[tuple[str, ...]], run_dir: str) -> list[str]:
    found = []
    for number, words in enumerate(cases):
        quick = ("train.max_steps=2", "logger=jsonl", f"run_dir={run_dir}/{number}")
        found.append(train(*quick, *words)["comm"])
    return found


@pytest.mark.slow
def test_the_choice_on_one_host(tmp_path: Path) -> None:
    for found in run_ranks(chosen, 2, list(CASES), str(tmp_path), init=False):
        assert dict(zip(CASES, found, strict=True)) == CASES


def set_up(run_dir: str) -> str:
    with context_of("logger=jsonl", f"run_dir={run_dir}") as context:
        return context.strategy.algorithm


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0], [0, 1], [0, 0, 0, 0]], ids=["alone", "two hosts", "four ranks"])
def test_otherwise_native_is_chosen(tmp_path: Path, hosts: list[int]) -> None:
    """The bits of more than two ranks depend on the order of sums, and must not depend on the hosts."""
    assert run_ranks(set_up, len(hosts), str(tmp_path), hosts=hosts, init=False) == ["native"] * len(hosts)


def one_in_another_container(run_dir: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.distributed.rendezvous.surroundings", lambda: os.environ["RANK"])
        return set_up(run_dir)


def test_two_containers_share_no_memory(tmp_path: Path) -> None:
    assert run_ranks(one_in_another_container, 2, str(tmp_path), init=False) == ["native"] * 2


def moved(number: int, is_last: bool) -> Any:
    return SimpleNamespace(number=number, is_last=lambda: is_last)


def test_the_last_bucket_is_reduced_in_the_callers_thread() -> None:
    seen, go_on = [], threading.Event()

    def all_reduce(bucket: Any, record: BucketRecord) -> Tensor:
        if bucket.number == 1:
            assert go_on.wait(20)
        seen.append((bucket.number, threading.current_thread() is threading.main_thread()))
        return torch.tensor(bucket.number)

    worker = Worker(all_reduce)
    assert worker.submit(moved(0, is_last=True), BucketRecord(0, 1, 0.0)).wait() == 0
    first = worker.submit(moved(1, is_last=False), BucketRecord(0, 1, 0.0))
    last = worker.submit(
        moved(2, is_last=True), BucketRecord(0, 1, 0.0)
    )  # after a bucket that is being reduced
    go_on.set()
    assert (first.wait(), last.wait()) == (1, 2)
    assert worker.submit(moved(3, is_last=True), BucketRecord(0, 1, 0.0)).wait() == 3
    assert seen == [(0, True), (1, False), (2, False), (3, True)]
    worker.close()


def test_an_error_in_the_callers_thread_is_kept_by_the_worker() -> None:
    def all_reduce(bucket: Any, record: BucketRecord) -> Tensor:
        raise ValueError(f"bucket {bucket.number}")

    worker = Worker(all_reduce)
    failed = worker.submit(moved(0, is_last=True), BucketRecord(0, 1, 0.0))
    with pytest.raises(Exception, match="bucket 0"):
        failed.wait()
    with pytest.raises(Exception, match="bucket 0"):  # peers are no longer in step
        worker.submit(moved(1, is_last=False), BucketRecord(0, 1, 0.0)).wait()
    assert str(worker.error) == "bucket 0"
    worker.close()
