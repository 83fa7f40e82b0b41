"""State that could not be resumed is refused by name before the first step."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint import tiny
from tests.failures.test_ends import TINY, refusals
from tests.ranks import run_ranks
from tests.runs import whole_and_resumed
from trainer import api
from trainer.checkpoint.savable import Savable
from trainer.errors import UserError

QUICK = (*TINY, "schedule=constant", "train.log_every_steps=1", "train.eval_every_epochs=0")


def model(name: str, **options: object) -> tuple[str, ...]:
    settings = (f"+model.{key}={value}" for key, value in options.items())
    return (f"model._target_=tests.checkpoint.odd.{name}", *settings)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ["strategy=single"]),
        pytest.param(
            2, ["strategy=ddp", "checkpoint=sharded", "checkpoint.async=true"], marks=pytest.mark.slow
        ),
        pytest.param(2, ["strategy=fsdp"], marks=pytest.mark.slow),
    ],
)
def test_module_state_is_resumed(tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    words = (*QUICK, *model("AllThatIsRight"), *overrides, "checkpoint.every_steps=1", "train.max_steps=3")
    whole, resumed = run_ranks(whole_and_resumed, world_size, tmp_path, 2, *words, init=False)[0]
    assert whole == resumed
    loaded = dict(api.load_model(tmp_path / "whole", "newest").named_buffers())
    assert loaded["parts.6.mean"].any() and not loaded["parts.6.mean"].equal(loaded["parts.6.square"])


BEFORE = {
    model("Renamed"): r"load_state_dict.. does not restore its state_dict.*Missing key.* .layers.0.weight",
    model("Rounded"): "the values of layers.0.weight change",
    model("OneWay"): r"the model, a \w*OneWay, defines get_extra_state but not set_extra_state",
    model("Keeps"): "model._extra_state.seen cannot be saved, because it is a set",
}
MADE = r"has changed, so a resume .*: {}; create buffers in __init__"
AFTER = {
    model("Late", grows="false", persistent="true"): MADE.format("unexpected model.cache"),
    model("Late", grows="true", persistent="true"): MADE.format(
        r"different model.cache \(\[2\] float32 now, \[1\] float32 before\)"
    ),
}


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "single"), pytest.param(2, "fsdp", marks=pytest.mark.slow)]
)
def test_state_that_no_resume_could_load_is_refused_by_name(
    tmp_path: Path, world_size: int, strategy: str
) -> None:
    """It is refused after the dry run at the latest, even if the first save follows the third step."""
    words = [*BEFORE.values(), *AFTER.values()]
    common = (*QUICK, "train.max_steps=3", f"strategy={strategy}")
    mistakes = [(*common, *each, f"run_dir={tmp_path}/{n}") for n, each in enumerate((*BEFORE, *AFTER))]
    ranks = run_ranks(refusals, world_size, *mistakes, init=False)
    assert all(rank == ranks[0] for rank in ranks)
    for number, (message, pattern) in enumerate(zip(ranks[0], words, strict=True)):
        assert re.search(pattern, message), message
        metrics = tmp_path / str(number) / "metrics.jsonl"
        assert not metrics.exists() or not metrics.read_text(), "refused before a step was logged"


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (torch.empty(2, dtype=torch.uint4), r"is torch.uint4, .* \.view\(torch.uint8\)"),
        (torch.zeros(1).expand(3), r"is expanded, .* add .clone\(\)"),
    ],
    ids=["dtype", "expanded"],
)
def test_a_buffer_that_no_resume_could_fill_is_refused(held: Tensor, words: str) -> None:
    state = tiny.train_state()
    state.model.register_buffer("held", held)
    with pytest.raises(UserError, match=f"model.held cannot be saved, because it {words}"):
        Savable(state)
