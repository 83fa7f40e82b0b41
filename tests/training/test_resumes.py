"""A resumed run on two ranks has the bits and the metrics of an uninterrupted run."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import test_trainer_gather
from tests.ranks import run_ranks
from tests.report import test_loss_parts
from tests.runs import whole_and_resumed
from tests.strategies import test_used
from trainer.data.tokenize import main

SAVES = ("checkpoint.every_steps=2", "checkpoint.every_epochs=null", "checkpoint=sharded")
SHORT = (*SAVES, "train.max_steps=5", "train.log_every_steps=1", "train.eval_every_epochs=0")
BY_CLOCK = ("checkpoint.every_steps=null", "checkpoint.every_minutes=1e-9")
UNEVEN = ("+model.rule='one each'", "strategy.find_unused_parameters=true", "optim=adamw")
TOKENS = ("data=tokens", "data.dataset.path=FOLDER/tokens", "data.dataset.block_size=8", "logger=jsonl")
JOBS = {
    "parts of a loss": (*test_loss_parts.RUN, *SHORT, "train.micro_batch_size=8"),
    "trainer.gather": (*test_trainer_gather.RUN, *SHORT),
    "uneven use": (*test_used.PARTS, *SHORT, *UNEVEN),
    "saved by the clock": (*test_loss_parts.RUN, *SHORT, *BY_CLOCK),
    "tokens": (*TOKENS, *SHORT, "model=gpt", "model.depth=1", "train.global_batch_size=8"),
}


def _resumed(folder: Path, *overrides: str) -> list[Any]:
    jobs = [[word.replace("FOLDER", str(folder)) for word in (*job, *overrides)] for job in JOBS.values()]
    return [whole_and_resumed(folder / str(number), 2, *job) for number, job in enumerate(jobs)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_kind_of_job_resumes_exactly(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "text").write_text("Each token of this text is a byte. " * 100)
    assert main([str(tmp_path / "text"), str(tmp_path / "tokens"), "--tokenizer", "bytes"]) == 0
    found = run_ranks(_resumed, 2, tmp_path, f"strategy={strategy}", init=False)[0]
    for job, ((whole, numbers), resumed) in zip(JOBS, found, strict=True):
        assert resumed == (whole, numbers), job
        assert [set(of_step) >= {"train/loss", "train/lr"} for of_step in numbers] == [True] * 3, job
    assert {"train/entropy", "train/size"} <= found[0][0][1][0].keys()
