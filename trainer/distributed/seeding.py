"""Random numbers: a seed for each rank, each micro-batch and each of many generators."""

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import torch

from trainer.accelerator import is_accelerator, seed_generator


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch (CPU and every GPU), differently on each ``rank``.

    What is drawn within a step follows from `seed_micro_batch`, and the order of the data from neither.
    ``numpy.random.SeedSequence`` mixes the numbers: neighbouring ones are unrelated.
    """
    words = np.random.SeedSequence([seed, rank]).generate_state(4, np.uint32)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed((int(words[2]) << 32) | int(words[3]))


def seed_micro_batch(seed: int, step: int, micro_batch: int, devices: Sequence[torch.device] = ()) -> None:
    """Seed Python, NumPy, torch's CPU generator and those of ``devices`` for one micro-batch.

    What the micro-batch draws follows from the three numbers alone. So a resumed run draws what it would have
    drawn, and no checkpoint holds a generator. At another world size the same numbers meet other samples.

    Args:
        step: -1 for evaluation, which draws the same each time.
        micro_batch: the number of the micro-batch within the step, over all replicas; in evaluation, of its
            first sample.
    """
    drawn = hashlib.blake2b(f"{seed} {step} {micro_batch}".encode(), digest_size=20).digest()
    for_torch = int.from_bytes(drawn[:8], "little")
    random.seed(drawn[8:16])  # an int takes longer
    np.random.seed(int.from_bytes(drawn[16:], "little"))
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed takes 30 times as long
    for number, device in enumerate(devices):
        if is_accelerator(device):
            seed_generator(device, for_torch + number)


def mixed_seed(seed: int, number: int) -> int:
    """A separate 64-bit seed for the ``number``-th of a run's many generators."""
    low, high = np.random.SeedSequence([seed, number]).generate_state(2, np.uint32)
    return (int(high) << 32) | int(low)
