"""train.micro_batch_size=auto: trials find a size that fits on all ranks, and have no side effects."""

import logging
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.ranks import RankFailure, run_ranks
from tests.runs import settings
from trainer import micro_batch
from trainer import run as story
from trainer.errors import UserError

SIZE = "train.micro_batch_size"
LITTLE, MUCH = 900 << 20, 10 << 30  # bytes that a rank may take; a sample takes 64 MiB
RUN = (
    *("model._target_=tests.user_parts.Scratch", "~model.input_shape", "~model.num_classes", "~model.hidden"),
    *("train.global_batch_size=32", "train.max_steps=4", "checkpoint.every_steps=2", "schedule=constant"),
    *("train.eval_every_epochs=0", "logger=jsonl"),
)


def num_sockets() -> int:
    return sum(
        "socket" in str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    )


def ran(free: list[int], *overrides: str) -> dict[str, Any]:
    """Train with `free` bytes of memory on each rank.

    Returns the hash, the size in config.yaml, the log lines about sizes, and the number of sockets that the
    trials left open.
    """
    warnings: list[str] = []
    opened = 0
    find = story.with_micro_batch_size

    def find_and_count(*arguments: Any) -> Any:
        nonlocal opened
        before = num_sockets()
        config = find(*arguments)
        opened = num_sockets() - before
        return config

    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    micro_batch.log.addHandler(handler)
    config = settings(*RUN, *overrides)
    most = (int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10) + free[
        int(os.environ["RANK"])
    ]
    resource.setrlimit(resource.RLIMIT_DATA, (most, -1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "with_micro_batch_size", find_and_count)
        result = story.run(config)
    written = yaml.safe_load((Path(str(config.run_dir)) / "config.yaml").read_text())
    size = written["train"]["micro_batch_size"]
    return {"hash": result["param_sha256"], "size": size, "warnings": warnings, "opened": opened}


@pytest.mark.slow
def test_a_failing_size_is_halved_and_a_resume_keeps_the_result(tmp_path: Path) -> None:
    alone = "strategy=single"
    [found] = run_ranks(ran, 1, [LITTLE], alone, f"{SIZE}=auto", f"run_dir={tmp_path}/auto", init=False)
    [words] = found["warnings"]
    assert "auto: chose 8 of 32 samples per rank; 32 failed on rank 0" in words and "16 failed" in words
    [given] = run_ranks(ran, 1, [LITTLE], alone, f"{SIZE}=8", f"run_dir={tmp_path}/given", init=False)
    assert found["size"] == 8 and given["hash"] == found["hash"], "the try leaves no trace in the run"
    again = (alone, f"{SIZE}=auto", "resume=auto", "train.max_steps=6", f"run_dir={tmp_path}/auto")
    [resumed] = run_ranks(ran, 1, [MUCH], *again, init=False)
    assert resumed["size"] == 8 and not resumed["warnings"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "free"), [("ddp", [MUCH, LITTLE]), ("fsdp", [LITTLE, LITTLE])])
def test_all_ranks_use_the_smallest_size_that_fits(tmp_path: Path, strategy: str, free: list[int]) -> None:
    overrides = (f"strategy={strategy}",)
    found = run_ranks(ran, 2, free, *overrides, f"{SIZE}=auto", f"run_dir={tmp_path}/auto", init=False)
    given = run_ranks(ran, 2, free, *overrides, f"{SIZE}=8", f"run_dir={tmp_path}/given", init=False)
    assert found[0]["size"] == 8 and "16 failed on rank" in found[0]["warnings"][0]
    assert found[0]["hash"] == given[0]["hash"]  # rank 0 has it
    assert [rank["opened"] for rank in found] == [0, 0], "each try ends its groups"


@pytest.mark.slow
def test_under_fsdp_a_rank_without_memory_ends_the_run_and_is_named(tmp_path: Path) -> None:
    limits = ("strategy=fsdp", f"{SIZE}=auto", "distributed.timeout_s=12", f"run_dir={tmp_path}/auto")
    with pytest.raises(RankFailure) as failure:
        run_ranks(ran, 2, [MUCH, LITTLE], *limits, init=False)
    print(failure.value)
    assert "rank 1 (host 0) ran out of memory with 16 samples" in str(failure.value)
    assert "set train.micro_batch_size=8 or less" in str(failure.value)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        ran([60 << 20], *overrides)
    return str(error.value)


@pytest.mark.slow
def test_one_sample_that_does_not_fit_is_a_one_line_error(tmp_path: Path) -> None:
    few = ("strategy=single", "train.global_batch_size=2", f"{SIZE}=auto", f"run_dir={tmp_path}/auto")
    [words] = run_ranks(refused, 1, *few, init=False)
    assert (
        "not even 1 sample fits in memory; 2 failed" in words
        and "1 failed on rank 0" in words
        and "\n" not in words
    )


def out_later(run_dir: str) -> str:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError) as error:
        patch.setattr(torch.nn.Module, "__call__", no_memory)
        ran([MUCH], "strategy=single", f"{SIZE}=8", f"run_dir={run_dir}")
    return error.value.__notes__[0]


def test_running_out_of_memory_in_a_later_step_is_reported(tmp_path: Path) -> None:
    [later] = run_ranks(out_later, 1, str(tmp_path), init=False)
    assert later.startswith("train.micro_batch_size=8 was too large; a smaller micro-batch size")


def test_auto_is_refused_with_exact() -> None:
    with pytest.raises(UserError, match=r"micro_batch_size=auto is not supported with train.exact=4"):
        settings("train.exact=4", f"{SIZE}=auto")
