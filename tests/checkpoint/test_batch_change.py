"""A run resumed repeatedly with other batch sizes reads every sample of each epoch exactly once, in order."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests import runs
from tests.ranks import run_ranks
from trainer import loop
from trainer.distributed.process_group import Dist, process_group
from trainer.errors import UserError
from trainer.launch.signals import StopRequest
from trainer.run import assemble

NUM_SAMPLES = 192
# 48 samples, to 112, over the end of the epoch to 64 of the next, and to its end: each leg ends between two batches.
LEGS = ((16, 3), (32, 5), (8, 23), (64, None))
MICRO = (8, 4, 4, 16)  # accumulated once, four times, once, twice on each of two ranks
SETTINGS = (
    "logger=jsonl",
    "data.dataset._target_=tests.checkpoint.test_batch_change.Numbered",
    "model._target_=tests.checkpoint.test_batch_change.OneLayer",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "train.epochs=2",
    "train.eval_every_epochs=0",
    "train.log_every_steps=1",
)


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Sample k is its own number."""

    def __init__(self, split: str, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index % 2)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layer(numbers / NUM_SAMPLES)


class Noting:
    """A task that records the numbers of each micro-batch."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.numbers: list[list[int]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.numbers.append(batch[0][:, 0].int().tolist())
        return self._task.loss(model, batch)


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def leg(
    dist: Dist, run_dir: Path, batch_size: int, *overrides: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """The numbers of each step of this rank, and where the leg ended."""
    batch = (f"train.global_batch_size={batch_size}", f"run_dir={run_dir}", "resume=auto")
    config = runs.settings(*SETTINGS, *batch, *overrides)
    with StopRequest() as stop_request:
        context = assemble(config, "tests", dist, stop_request)
        context.run_log.open()
        noting = Noting(context.task)
        end = loop.fit(dataclasses.replace(context, task=noting))
    context.checkpointer.finish_saving()
    context.strategy.close()
    context.run_log.close()
    accumulated = range(0, len(noting.numbers), context.batch.accumulation)
    steps = [flat(noting.numbers[start : start + context.batch.accumulation]) for start in accumulated]
    return steps, end | {"total_steps": context.total_steps}


def all_legs(run_dir: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"steps": [], "ends": []}
    with process_group(runs.settings().distributed) as dist:
        for (batch_size, max_steps), micro in zip(LEGS, MICRO, strict=True):
            last = f"train.max_steps={'null' if max_steps is None else max_steps}"
            steps, end = leg(dist, run_dir, batch_size, last, f"train.micro_batch_size={micro}")
            found["steps"] += steps
            found["ends"].append(end)
            torch_dist.barrier()
        for number in (NUM_SAMPLES - 1, NUM_SAMPLES + 1):
            with pytest.raises(UserError) as refused:
                leg(dist, run_dir, 16, f"+data.dataset.num_samples={number}")
            found[str(number)] = str(refused.value)
    return found


@pytest.mark.slow
def test_every_sample_exactly_once_over_batches_of_16_32_8_64(tmp_path: Path) -> None:
    ranks = run_ranks(all_legs, 2, tmp_path, init=False)
    steps = [sorted(flat(parts)) for parts in zip(*(rank["steps"] for rank in ranks), strict=True)]
    assert [len(step) for step in steps] == [16] * 3 + [32] * 2 + [8] * 18 + [64] * 2
    read = flat(steps)
    assert sorted(read[:NUM_SAMPLES]) == sorted(read[NUM_SAMPLES:]) == list(range(NUM_SAMPLES))
    order = [
        torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1)
    ]
    batches = torch.tensor(flat(order)).split([len(step) for step in steps])
    assert steps == [sorted(batch.tolist()) for batch in batches], "in the order of (seed, epoch)"
    ends = ranks[0]["ends"]
    assert [end["total_steps"] for end in ends] == [3, 5, 23, 25]
    assert [end["samples_seen"] for end in ends] == [48, 112, 256, 384]
    assert [end["epochs"] for end in ends] == [48 / 192, 112 / 192, 1 + 64 / 192, 2.0]
    for number in (191, 193):
        for rank in ranks:
            assert f"the training data holds {number} samples, but 192 when" in rank[str(number)]
