"""The flags that a run sets for its process."""

import multiprocessing
import resource
from collections.abc import Callable

import torch

from trainer.config import TrainConfig
from trainer.distributed.backend_flags import set_backend_flags


def _page_faults(answer: Callable[[int], None]) -> None:
    """How many pages the system hands out while memory is freed and allocated again."""
    set_backend_flags(TrainConfig(), torch.device("cpu"))
    parts = [bytearray(2**21) for _ in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        parts.clear()
        parts += [bytearray(2**21) for _ in range(8)]
    answer(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_memory_that_a_step_frees_is_kept_for_the_next() -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_page_faults, args=(send.send,))
    process.start()
    assert receive.poll(60)
    pages_of_one_round = 8 * 2**21 // resource.getpagesize()
    assert receive.recv() < pages_of_one_round  # without the flags, of each of ten
    process.join(60)
