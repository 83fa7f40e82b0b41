"""Random numbers: the seed of each rank, and how generators are saved and restored."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch (CPU and every CUDA device), differently on each ``rank``.

    Ranks differ so that dropout and the like differ between data replicas; the order of the data never
    depends on this seed. ``numpy.random.SeedSequence`` mixes the numbers: neighbouring ones are unrelated.
    """
    words = np.random.SeedSequence([seed, rank]).generate_state(4, np.uint32)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed((int(words[2]) << 32) | int(words[3]))


def mixed_seed(seed: int, number: int) -> int:
    """A separate 64-bit seed for the ``number``-th of a run's many generators."""
    low, high = np.random.SeedSequence([seed, number]).generate_state(2, np.uint32)
    return (int(high) << 32) | int(low)


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process, in tensors, numbers and lists only.

    CUDA states start with the current device, so that they can be restored under another numbering.
    """
    version, words, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss_next": gauss_next},
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices_current_first()],
    }


def check_rng_state(state: dict[str, Any]) -> None:
    """Raise an exception unless ``set_rng_state`` can restore ``state``; changes no generator."""
    python, numpy = state["python"], state["numpy"]
    random.Random().setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    if not isinstance(python["gauss_next"], float | None):
        raise TypeError(f"gauss_next is {python['gauss_next']!r}")
    # NumPy accepts any position and any length, and reads there.
    key, pos = numpy["key"], numpy["pos"]
    if numpy["bit_generator"] != "MT19937" or key.shape != (624,) or not 0 <= pos <= 624:
        raise ValueError(f"{numpy['bit_generator']!r} with {list(key.shape)} words, at {pos}, is not MT19937")
    float(numpy["gauss"]), int(numpy["has_gauss"])
    torch.Generator().set_state(state["torch"])
    for device, cuda_state in zip(_cuda_devices_current_first(), state["cuda"], strict=False):
        torch.Generator(f"cuda:{device}").set_state(cuda_state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of ``rng_state``. CUDA states beyond the devices present here are skipped."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
    np.random.set_state(
        {
            "bit_generator": numpy["bit_generator"],
            "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    for device, cuda_state in zip(_cuda_devices_current_first(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, device)


def _cuda_devices_current_first() -> list[int]:
    # A process that never used CUDA has no state there, and asking would create a context on GPU 0.
    if not torch.cuda.is_initialized():
        return []
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    return [(current + offset) % count for offset in range(count)]
