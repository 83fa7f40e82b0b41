"""train.micro_batch_size=auto: what fits is found without harm, agreed on, and kept."""

import logging
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.programs import fork_what_starts
from tests.ranks import run_ranks
from tests.runs import settings
from trainer.errors import UserError
from trainer.launch import fresh
from trainer.run import run
from trainer.training import micro_batch

SIZE = "train.micro_batch_size"
RUN = (
    *("model._target_=tests.user_parts.Scratch", "~model.input_shape", "~model.num_classes", "~model.hidden"),
    *("train.global_batch_size=32", "train.max_steps=4", "checkpoint.every_steps=2", "schedule=constant"),
    *("train.eval_every_epochs=0", "logger=jsonl", "distributed.timeout_s=120"),
)


def forked_tries(most: int) -> list[subprocess.Popen[bytes]]:
    """Fork the processes of the next tries, which wait for their task, while this one has no threads yet."""
    fork_what_starts()
    pipe = subprocess.PIPE
    module = "trainer.memory.trial_steps"
    waiting = [fresh.start([], module=module, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(most)]
    micro_batch.fresh = SimpleNamespace(start=lambda *_, **__: waiting.pop())  # type: ignore[assignment]
    return waiting


def ran(free: list[int], *overrides: str, forks: bool = True) -> dict[str, Any]:
    """A run whose ranks have `free` bytes each, its size in config.yaml, and what it said of sizes."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    micro_batch.log.addHandler(handler)
    micro_batch._free_bytes = lambda dist: free[dist.rank]
    config = settings(*RUN, *overrides)
    waiting = forked_tries(3) if forks else []
    try:
        result = run(config)
    finally:
        micro_batch.log.removeHandler(handler)
        for process in waiting:
            process.communicate()
    size = yaml.safe_load((Path(str(config.run_dir)) / "config.yaml").read_text())["train"][
        "micro_batch_size"
    ]
    return {"hash": result["param_sha256"], "size": size, "told": told}


def refused(free: list[int], *overrides: str, forks: bool = True) -> str:
    with pytest.raises(UserError) as error:
        ran(free, *overrides, forks=forks)
    return str(error.value)


@pytest.mark.slow
def test_a_size_that_fails_is_halved_and_a_resume_keeps_the_one_that_fits(tmp_path: Path) -> None:
    free, alone = [900 << 20], "strategy=single"
    [found] = run_ranks(ran, 1, free, alone, f"{SIZE}=auto", f"run_dir={tmp_path}/auto", init=False)
    assert found["size"] == 8, "the prediction sees no scratch memory: 32 and 16 fail, in their process alone"
    [words] = found["told"]
    assert "auto: 8 of the 32 samples of a rank; 32 failed on rank 0" in words and "16 failed" in words
    [given] = run_ranks(ran, 1, free, alone, f"{SIZE}=8", f"run_dir={tmp_path}/given", init=False)
    assert given["hash"] == found["hash"], "the try leaves no trace in the run"
    again = (alone, f"{SIZE}=auto", "resume=auto", "train.max_steps=6", f"run_dir={tmp_path}/auto")
    [resumed] = run_ranks(ran, 1, [10 << 30], *again, init=False)
    assert resumed["size"] == 8 and not resumed["told"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_take_what_the_smallest_holds(tmp_path: Path, strategy: str) -> None:
    free, overrides = [10 << 30, 900 << 20], (f"strategy={strategy}",)
    found = run_ranks(ran, 2, free, *overrides, f"{SIZE}=auto", f"run_dir={tmp_path}/auto", init=False)
    given = run_ranks(ran, 2, free, *overrides, f"{SIZE}=8", f"run_dir={tmp_path}/given", init=False)
    assert found[0]["size"] == 8 and "16 failed on rank 1" in found[0]["told"][0]
    assert found[0]["hash"] == given[0]["hash"]  # rank 0 has it


def unlike(kind: str, run_dir: str) -> str:
    """What is said of a try that gives no answer, or of memory that ends after the try."""
    if kind == "silent":
        micro_batch._PATIENCE = 1e-3  # type: ignore[misc]
        return refused([10 << 30], "strategy=single", f"{SIZE}=auto", f"run_dir={run_dir}")

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.nn.Module.__call__ = no_memory  # type: ignore[method-assign, assignment]
    with pytest.raises(torch.OutOfMemoryError) as error:
        ran([10 << 30], "strategy=single", f"{SIZE}=8", f"run_dir={run_dir}")
    return error.value.__notes__[0]


@pytest.mark.slow
def test_a_try_without_an_answer_and_memory_that_ends_later_are_told(tmp_path: Path) -> None:
    silent, later = (
        run_ranks(unlike, 1, kind, str(tmp_path / kind), init=False)[0] for kind in ("silent", "later")
    )
    assert "gives no answer for 0 s" in silent and "set a larger distributed.timeout_s, or a number" in silent
    assert "1 sample" not in silent
    assert later.startswith("train.micro_batch_size=8 was too large: a smaller one makes the same")


@pytest.mark.slow
def test_without_room_for_one_sample_a_program_of_its_own_tells_in_one_line(tmp_path: Path) -> None:
    [words] = run_ranks(
        *(refused, 1, [60 << 20], "strategy=single", "train.global_batch_size=2", f"{SIZE}=auto"),
        f"run_dir={tmp_path}/auto",
        forks=False,
        init=False,
    )
    assert "not even 1 sample fits" in words and "1 failed on rank 0" in words and "\n" not in words


@pytest.mark.parametrize("overrides", [("strategy=dp",), ("strategy=parameter_server",), ("train.exact=4",)])
def test_what_cannot_be_tried_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"micro_batch_size=auto.* not go with"):
        settings(*overrides, f"{SIZE}=auto")


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist: Any = type("Dist", (), {"local_world_size": 2, "device": type("Device", (), {"type": "cpu"})})
    most = micro_batch._free_bytes(dist)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 300\n")
    monkeypatch.setattr(micro_batch, "memory_files_of", lambda pid: [tmp_path / "memory.events"])
    assert micro_batch._free_bytes(dist) > most / 2, "no limit"
    (tmp_path / "memory.max").write_text("9000\n")
    assert micro_batch._free_bytes(dist) == (9000 - 700) // 2, "shared by the ranks of the host"
    no_limits = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda limit: (0, 0) if limit == resource.RLIMIT_AS else no_limits(limit)
    )
    assert micro_batch._free_bytes(dist) == 0
