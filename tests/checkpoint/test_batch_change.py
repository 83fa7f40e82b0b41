"""A run resumed repeatedly with other batch sizes reads every sample of each epoch exactly once, in order."""

from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from tests import runs
from tests.checkpoint.whole_runs import DDP, run
from tests.ranks import run_ranks
from trainer.distributed.process_group import process_group

# Of 36 samples an epoch: to 24, over its end to 12 of the next, and to the end of that; with accumulation.
LEGS = ((12, 6, 2), (6, 1, 6), (12, 3, 8))  # batch, micro-batch, last step
COMMON = ("train.epochs=2", "+model.norm=false")


def all_legs(root: Path) -> tuple[list[list[str]], list[list[str]], list[int]]:
    """Return the samples of each micro-batch on this rank, in an uninterrupted run and in resumed runs."""
    torch.set_num_threads(1)
    found, seen = list[list[str]](), list[int]()
    with process_group(runs.settings(*DDP).distributed) as ranks:
        whole = run(ranks, root / "whole", *DDP, "train.micro_batch_size=1", *COMMON)
        for batch_size, micro, last_step in LEGS:
            batch = (f"train.global_batch_size={batch_size}", f"train.micro_batch_size={micro}")
            words = (*DDP, *batch, f"train.max_steps={last_step}", *COMMON)
            leg = run(ranks, root / "legs", *words, resume="auto")
            found += leg["samples"]
            seen.append(leg["result"]["samples_seen"])
            torch_dist.barrier()
    return whole["samples"], found, seen


@pytest.mark.slow
def test_every_sample_exactly_once_over_batches_of_12_6_and_12(tmp_path: Path) -> None:
    for whole, legs, seen in run_ranks(all_legs, 2, tmp_path, init=False):
        assert seen == [24, 48, 72]
        flat = [[sample for micro_batch in samples for sample in micro_batch] for samples in (whole, legs)]
        assert len(set(flat[0])) == 36 and flat[0] == flat[1]
