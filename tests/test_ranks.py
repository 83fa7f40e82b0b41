"""The ranks of all other tests: real processes, named when they fail."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks
from trainer.checkpoint import store


def _sum(scale: float) -> tuple[torch.Tensor, int]:
    value = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value, os.getpid()


def test_results_come_back_by_rank() -> None:
    results = run_ranks(_sum, 3, 2.0)
    assert all(torch.equal(value, torch.full((3,), 12.0)) for value, _ in results)
    assert len({pid for _, pid in results} | {os.getpid()}) == 4


def _raise_in_one() -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def test_an_exception_comes_back_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match="on purpose") as failure:
        run_ranks(_raise_in_one, 2)
    assert "_raise_in_one" in failure.value.reports[1]
    assert "on purpose" not in failure.value.reports.get(0, "")


def _hang_in_one() -> int:
    dist.barrier()  # who leaves before the others have connected to it ends them
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 7


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    with pytest.raises(RankFailure, match="rank 1: did not finish") as failure:
        run_ranks(_hang_in_one, 2, timeout_s=4)
    assert "_hang_in_one" in failure.value.reports[1]
    assert failure.value.results == {0: 7}


def _die_in_one() -> None:
    dist.barrier()  # as in _hang_in_one
    if dist.get_rank() == 0:
        os._exit(9)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="rank 0: died with exit code 9"):
        run_ranks(_die_in_one, 2)


def _leave(what: str) -> int:
    """What a double or a run may leave behind."""
    match what:
        case "a method":
            store.Store.commit = lambda *args: None  # type: ignore[assignment, method-assign, return-value]
        case "a thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        case "what is put back":
            os.environ["RANK"] = "7"
            os.chdir("/")
            torch.manual_seed(5)
            random.seed(5)
            torch.set_default_dtype(torch.float64)
            logging.getLogger("trainer").warning = lambda *args: None  # type: ignore[method-assign]
    return os.getpid()


def _state() -> tuple[int, Any]:
    drawn = torch.rand(1).item(), torch.get_default_dtype()
    doubles = "lambda" in f"{store.Store.commit}{logging.getLogger('trainer').warning}"
    return os.getpid(), (drawn, doubles, Path.cwd(), os.environ["RANK"])


def test_a_rank_that_is_as_good_as_new_takes_the_next_function() -> None:
    [(_, new)] = run_ranks(_state, 1, init=False, fresh=True)
    [pid] = run_ranks(_leave, 1, "what is put back", init=False)
    assert run_ranks(_state, 1, init=False) == [(pid, new)]


@pytest.mark.parametrize("what", ["a method", pytest.param("a thread", marks=pytest.mark.slow)])
def test_a_rank_in_which_something_is_left_takes_none(what: str) -> None:
    [(_, new)] = run_ranks(_state, 1, init=False, fresh=True)
    [pid] = run_ranks(_leave, 1, what, init=False)
    [(next_pid, state)] = run_ranks(_state, 1, init=False)
    assert next_pid != pid and state == new
