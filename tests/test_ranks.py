"""tests.ranks: real processes, reported if they fail."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks
from trainer.checkpoint import store


def _leave(what: str) -> int:
    """Leave behind what a test or a run may leave behind."""
    match what:
        case "a method":
            store.Store.commit = lambda *args: None  # type: ignore[assignment, method-assign, return-value]
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


def test_a_clean_rank_is_reused() -> None:
    [(_, new)] = run_ranks(_state, 1, init=False, fresh=True)
    [pid] = run_ranks(_leave, 1, "what is put back", init=False)
    assert run_ranks(_state, 1, init=False) == [(pid, new)]


def test_a_rank_with_leftovers_is_not_reused() -> None:
    [(_, new)] = run_ranks(_state, 1, init=False, fresh=True)
    [pid] = run_ranks(_leave, 1, "a method", init=False)
    [(next_pid, state)] = run_ranks(_state, 1, init=False)
    assert next_pid != pid and state == new
