"""Messages of a run about its data, and about known errors of torch."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from tests.ranks import run_ranks
from tests.runs import settings, train
from trainer.errors import NonFiniteError
from trainer.troubleshooting import causes_named

NAN = (
    *("logger=jsonl", "data.dataset._target_=tests.user_parts.NanAt", "+data.dataset.index=70"),
    *("model._target_=tests.user_parts.Tiny", "~model.hidden", "~model.input_shape", "~model.num_classes"),
    *("train.global_batch_size=16", "train.micro_batch_size=4", "train.eval_every_epochs=0"),
)


def refused(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(NonFiniteError) as ended:
        train(*NAN, f"run_dir={run_dir}", *overrides)
    return str(ended.value)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ("strategy=single",)),
        pytest.param(2, ("strategy=ddp",), marks=pytest.mark.slow),
        pytest.param(2, ("strategy=fsdp", "data.num_workers=1"), marks=pytest.mark.slow),
    ],
)
def test_the_sample_that_contains_nan_is_named(
    world_size: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    for said in run_ranks(refused, world_size, tmp_path, *overrides, init=False):
        assert "Its data contains NaN or Inf, in sample 70 of NanAt: fix or remove that sample" in said


def test_a_nan_loss_from_finite_samples_blames_no_sample(tmp_path: Path) -> None:
    task = (
        "data.task._target_=tests.user_parts.FailsAt",
        "~data.task.label_smoothing",
        "+data.task.how='nan'",
    )
    sound = ("data.dataset._target_=tests.user_parts.Stripes", "~data.dataset.index")
    words = ("strategy=single", *sound, *task, "+data.task.rank=0", "+data.task.call=2")
    (said,) = run_ranks(refused, 1, tmp_path, *words, init=False)
    assert "Lower optim.lr" in said and "sample" not in said


STREAM = (
    *(
        "strategy=single",
        "logger=jsonl",
        "data.dataset._target_=tests.data.streams.Numbers",
        "model.hidden=[8]",
    ),
    *("model.input_shape=[10]", "model.num_classes=4", "train.global_batch_size=12", "train.max_steps=5"),
    *("train.log_every_steps=2", "train.eval_every_epochs=0"),
)


def test_a_stream_logs_samples_instead_of_epochs(tmp_path: Path) -> None:
    """The line of the first step, also after a resume, has no means."""
    run_ranks(train, 1, *STREAM, "train.max_steps=4", f"run_dir={tmp_path}", init=False)
    run_ranks(train, 1, *STREAM, "resume=auto", f"run_dir={tmp_path}", init=False)
    said = (tmp_path / "train.log").read_text()
    assert "step 2/4  24 samples  loss" in said and "step 4/4  48 samples  loss" in said
    assert "epoch " not in said
    first = re.findall(r"step (\d)/\d  loss \d\.\d{4}  \d+\.\d\d s$", said, re.MULTILINE)
    assert first == re.findall(r"step ([135])/", said) == ["1", "5"]


def _of_batch_norm() -> None:
    torch.nn.BatchNorm1d(3)(torch.ones(1, 3))


def _of_inductor() -> None:
    raise InvalidCxxCompiler


def _of_workers() -> None:
    raise RuntimeError(
        "DataLoader worker is killed by signal: Bus error. ... workers are out of shared memory."
    )


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (_of_batch_norm, "train.global_batch_size is 64, and train.micro_batch_size is null"),
        (_of_inductor, "train.compile=true requires a C++ compiler"),
        (_of_workers, "/dev/shm, through which data workers return batches, may be full"),
    ],
)
def test_known_torch_errors_get_a_note_that_names_settings(fail: Callable[[], None], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as failed, causes_named(settings().train):
        fail()
    (note,) = failed.value.__notes__
    assert words in note
