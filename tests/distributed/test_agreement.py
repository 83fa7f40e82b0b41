"""Actions on one or all ranks, whose results and errors reach every rank."""

import pickle

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks
from trainer.distributed.agreement import Agreement, compare_across_ranks, on_main
from trainer.distributed.ranks import Ranks
from trainer.errors import RetryableError, UserError


def fail(error: Exception) -> None:
    raise error


def message_of(action: object, kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as raised:
        action()  # type: ignore[operator]
    return str(raised.value)


def ranks_here() -> Ranks:
    return Ranks(dist.get_rank(), 0, 2, 2, (0, 0), torch.device("cpu"), "gloo")


def heard() -> dict[str, object]:
    ranks = ranks_here()
    files, here = Agreement(ranks, 60), f"rank {ranks.rank}"
    return {
        "one acts": on_main(lambda: here, ranks),
        "one errs": message_of(lambda: on_main(lambda: fail(UserError(f"{here} errs")), ranks)),
        "one acts on a file": files.on_main(lambda: here),
        "one meets a full disk": message_of(
            lambda: files.on_main(lambda: fail(OSError(f"{here} is full"))), RetryableError
        ),
        "one may not": message_of(lambda: files.on_main(lambda: fail(PermissionError(13, "no right")))),
        "all act": files.everywhere(lambda: here),
        "all err": message_of(lambda: files.everywhere(lambda: fail(UserError("the same")))),
        "the last errs": message_of(
            lambda: files.everywhere(lambda: ranks.rank == 1 and fail(KeyError("x"))), RetryableError
        ),
        "differ": message_of(lambda: compare_across_ranks({"seed": ranks.rank}, ranks, "say seed=0")),
    }


def test_every_rank_gets_the_result_or_the_error() -> None:
    first, second = run_ranks(heard, 2)
    assert (first.pop("all act"), second.pop("all act")) == ("rank 0", "rank 1")
    assert (
        first
        == second
        == {
            "one acts": "rank 0",
            "one errs": "rank 0 errs",
            "one acts on a file": "rank 0",
            "one meets a full disk": "OSError: rank 0 is full",
            "one may not": "PermissionError: [Errno 13] no right",
            "all err": "the same",
            "the last errs": "rank 1: KeyError: 'x'",
            "differ": "rank 1 (host 0) differs from rank 0 in seed: 1 instead of 0; say seed=0",
        }
    )


def raises_a_fault() -> None:
    on_main(lambda: fail(ZeroDivisionError("of the user's code")), ranks_here())


def test_an_unexpected_error_of_rank_0_keeps_its_traceback() -> None:
    with pytest.raises(RankFailure, match="ZeroDivisionError: of the user's code"):
        run_ranks(raises_a_fault, 1)


def sent_if_equal() -> int:
    """Return the number of bytes that a rank sends if all ranks have the same megabyte of facts."""
    sent, gather = list[int](), dist.all_gather_object

    def counted(gathered: list[object], value: object, group: object = None) -> None:
        sent.append(len(pickle.dumps(value)))
        gather(gathered, value, group=group)

    dist.all_gather_object = counted
    try:
        compare_across_ranks({f"parameter {number}": "x" * 1000 for number in range(1000)}, ranks_here())
    finally:
        dist.all_gather_object = gather
    return sum(sent)


def test_only_a_hash_of_equal_facts_is_sent() -> None:
    assert max(run_ranks(sent_if_equal, 2)) < 100
