"""The samples of a step at any world size; an evaluation counts each sample once."""

import itertools

import pytest
import torch

from trainer.data.loading.batch import split_batch, split_chunks
from trainer.data.loading.sampler import IndexRequests, Requests
from trainer.errors import UserError


def requests(
    num_samples: int, batch: int, replicas: int, replica: int, micro: int | None = None, seed: int = 3
) -> IndexRequests:
    split = split_batch(batch, micro, replicas)
    return IndexRequests(range(num_samples), split, replica, seed)


def steps(
    num_samples: int, batch: int, replicas: int, epoch: int, micro: int | None = None
) -> list[list[int]]:
    """Return the global batch of each step, in the order of the permutation."""
    local, per_replica = batch // replicas, []
    for replica in range(replicas):
        drawn = requests(num_samples, batch, replicas, replica, micro)
        drawn.epoch = epoch
        flat = [index for request in drawn for index in request.numbers]
        per_replica.append([flat[i : i + local] for i in range(0, len(flat), local)])
    interleaved = zip(*per_replica, strict=True)
    return [[item for group in zip(*parts, strict=True) for item in group] for parts in interleaved]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [40, 43])  # 43: neither the batch nor the replicas divide it
def test_the_batch_of_a_step_is_a_slice_of_one_permutation(num_samples: int, replicas: int) -> None:
    for epoch in (0, 5):
        permutation = torch.randperm(num_samples, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        expected = [permutation[i : i + 8] for i in range(0, 40, 8)]
        assert steps(num_samples, 8, replicas, epoch) == expected
        assert steps(num_samples, 8, replicas, epoch, micro=2) == expected


@pytest.mark.parametrize(
    ("first_sample", "batch", "replicas"), [(16, 9, 3), (7, 4, 4), (39, 4, 2), (10, 32, 2)]
)
def test_a_resume_with_another_batch_size_continues_at_the_next_sample(
    first_sample: int, batch: int, replicas: int
) -> None:
    """The number of samples may not be a multiple of the batch or of the replicas."""
    permutation = torch.randperm(43, generator=torch.Generator().manual_seed(3)).tolist()
    parts = []
    for replica in range(replicas):
        drawn = requests(43, batch, replicas, replica)
        drawn.first_sample = first_sample
        parts.append([request.numbers for request in drawn])
        assert len(parts[-1]) == len(drawn)
    batches = [
        [item for group in zip(*step, strict=True) for item in group] for step in zip(*parts, strict=True)
    ]
    num_batches = (43 - first_sample) // batch
    assert [len(step) for step in batches] == [batch] * num_batches
    read = permutation[first_sample : first_sample + num_batches * batch]
    assert [item for step in batches for item in step] == read


@pytest.mark.parametrize(("num_samples", "replicas"), [(7, 1), (3, 8)])
def test_data_smaller_than_a_global_batch_is_refused(num_samples: int, replicas: int) -> None:
    with pytest.raises(UserError, match=f"has {num_samples} samples.*global batch of 8"):
        requests(num_samples, 8, replicas, 0)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_chunks_are_the_same_consecutive_samples_at_any_world_size(replicas: int) -> None:
    own = [range(rank * 8 // replicas, (rank + 1) * 8 // replicas) for rank in range(replicas)]
    splits = [split_chunks(16, None, 8, replicas, chunks) for chunks in own]
    trained = [
        samples
        for rank, split in enumerate(splits)
        for _, samples in itertools.islice(split.micro_batches(32, rank), split.accumulation)
    ]
    assert trained == [range(begin, begin + 2) for begin in range(32, 48, 2)]
    parts = [
        split.first_micro_batch(rank) + micro
        for rank, split in enumerate(splits)
        for micro in range(len(own[rank]))
    ]
    assert parts == list(range(8)) and {split.num_micro_batches for split in splits} == {8}
    held_out = [
        [
            list(request.numbers)
            for request in itertools.takewhile(lambda one: one.first < 43, Requests(split, rank, True))
        ]
        for rank, split in enumerate(splits)
    ]
    assert len({len(batches) for batches in held_out}) == 1
    chunks = [
        list(range(begin, begin + 2)) for begin in range(0, 48, 2)
    ]  # the reader leaves out what is beyond
    assert sorted(filter(None, itertools.chain(*held_out))) == chunks
