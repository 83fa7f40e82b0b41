"""A run resumed repeatedly with other batch sizes reads every sample of each epoch exactly once, in order."""

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
from tests.checkpoint.whole_runs import run
from tests.ranks import run_ranks
from trainer.distributed.process_group import process_group
from trainer.errors import UserError

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


def numbers_in(inputs: Tensor) -> list[int]:
    return inputs[:, 0].int().tolist()


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def all_legs(run_dir: Path) -> dict[str, Any]:
    """The numbers of each step of this rank, and where each leg ended."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"steps": [], "ends": []}
    with process_group(runs.settings().distributed) as dist:
        for (batch_size, max_steps), micro in zip(LEGS, MICRO, strict=True):
            batch = (f"train.global_batch_size={batch_size}", f"train.micro_batch_size={micro}")
            last = f"train.max_steps={'null' if max_steps is None else max_steps}"
            leg = run(dist, run_dir, *SETTINGS, *batch, last, resume="auto", named=numbers_in)
            read, accumulated = leg["samples"], batch_size // micro // 2
            found["steps"] += [flat(read[at : at + accumulated]) for at in range(0, len(read), accumulated)]
            found["ends"].append(leg["result"])
            torch_dist.barrier()
        with pytest.raises(UserError) as refused:
            fewer = f"+data.dataset.num_samples={NUM_SAMPLES - 1}"
            run(dist, run_dir, *SETTINGS, "train.global_batch_size=16", fewer, resume="auto")
        found["refused"] = str(refused.value)
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
    assert [end["steps"] for end in ends] == [3, 5, 23, 25]
    assert [end["samples_seen"] for end in ends] == [48, 112, 256, 384]
    assert [end["epochs"] for end in ends] == [48 / 192, 112 / 192, 1 + 64 / 192, 2.0]
    for rank in ranks:
        assert "the training data holds 191 samples, but 192 when" in rank["refused"]
