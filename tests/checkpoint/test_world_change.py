"""A run resumed with other ranks, strategy or format has the same tensors and reads the next samples."""

import itertools
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.checkpoint.whole_runs import DDP, FSDP, PS, SINGLE, differences, run
from tests.ranks import run_ranks
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.distributed.process_group import process_group

SHARDED = "checkpoint=sharded"
STOP, LAST_STEP = 4, 7  # the second epoch is a third done; the third has begun
LAST = (f"train.max_steps={LAST_STEP}", "train.eval_every_epochs=0")
HYBRID = (*FSDP, "strategy.shard_group=2")
PS_ALL = (*PS, "strategy.servers=all")
# All that write and all that read: what passes between the two is the files alone.
CHANGES = {
    "fsdp 2 -> ddp 3": (2, FSDP, 3, DDP),
    "ddp 3 -> fsdp 4, hybrid": (3, DDP, 4, HYBRID),
    "fsdp 4, hybrid -> single": (4, HYBRID, 1, SINGLE),
    "fsdp 2 -> ps 1+2": (2, FSDP, 3, PS),
    "ps 1+2, sharded -> ps all 3": (3, (*PS, SHARDED), 3, PS_ALL),
    "ps all 3 -> fsdp 2": (3, PS_ALL, 2, FSDP),
}
Wanted = tuple[int, tuple[str, ...], str]  # how many ranks, settings, what to resume
Seen = list[dict[str, Any]]  # by rank


def _runs(jobs: list[tuple[Path, tuple[str, ...], str]]) -> Seen:
    torch.set_num_threads(1)
    with process_group(runs.settings(*jobs[0][1]).distributed) as ranks:
        return [
            run(ranks, run_dir, *overrides, *LAST, resume=resume, save_at=[STOP])
            for run_dir, overrides, resume in jobs
        ]


def _seen(root: Path, wanted: Iterable[Wanted]) -> dict[Wanted, tuple[Seen, Path]]:
    """Return the samples of each rank in each run, and its directory; all runs of a size share processes."""
    found = {}
    by_world = itertools.groupby(sorted(dict.fromkeys(wanted), key=itemgetter(0)), key=itemgetter(0))
    for world, ones in [(world, list(ones)) for world, ones in by_world]:
        jobs = [(root / f"{world}-{number}", *one[1:]) for number, one in enumerate(ones)]
        ranks = run_ranks(_runs, world, jobs, init=False)
        for one, (run_dir, *_), *results in zip(ones, jobs, *ranks, strict=True):
            found[one] = (results, run_dir)
    return found


def _samples_by_step(results: Seen, num_steps: int) -> list[list[str]]:
    """Return the sorted samples of all ranks in each of the last ``num_steps`` steps."""
    steps: list[list[str]] = [[] for _ in range(num_steps)]
    results = [result for result in results if result["samples"]]  # a parameter server reads none
    per_rank = 12 // len(results)
    for result in results:
        samples = [sample for batch in result["samples"] for sample in batch][-per_rank * num_steps :]
        for number, sample in enumerate(samples):
            steps[number // per_rank].append(sample)
    return [sorted(step) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [False, True])
def test_the_same_tensors_and_the_next_samples(tmp_path: Path, servers: bool) -> None:
    """For each change, run uninterrupted, load its checkpoint half-way, and resume from it."""
    changes = {name: CHANGES[name] for name in CHANGES if ("ps" in name) == servers}
    begun = {name: (world, overrides, "null") for name, (world, overrides, *_) in changes.items()}
    whole = _seen(tmp_path / "whole", begun.values())
    half = {name: whole[one][1] / "checkpoints" / f"step_{STOP:08d}" for name, one in begun.items()}
    gone_on = {
        name: (world, overrides, str(half[name])) for name, (_, _, world, overrides) in changes.items()
    }
    changed = _seen(tmp_path / "changed", gone_on.values())
    for name in changes:
        (before, _), (after, _) = whole[begun[name]], changed[gone_on[name]]
        saved = OpenCheckpoint.open(half[name])
        tensors = {"tensors": saved.read(), "plain": saved.facts["state"]}
        assert differences(tensors, after[0]["begin"]) == [], name
        assert differences(after[0]["begin"], after[0]["end"]) != [], name
        expected = _samples_by_step(before, LAST_STEP)
        assert [len(set(step)) for step in expected] == [12] * LAST_STEP, name
        assert _samples_by_step(after, LAST_STEP - STOP) == expected[STOP:], name
