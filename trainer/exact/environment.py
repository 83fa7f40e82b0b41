"""The environment of an exact run: what decides its bits beside the settings and the data."""

import hashlib
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.accelerator import is_accelerator
from trainer.distributed.backend_flags import facts_of, set_deterministic
from trainer.distributed.ranks import Ranks
from trainer.files.untrusted import printable

log = logging.getLogger("trainer")

NUM_THREADS = 1


def prepare(device: torch.device) -> None:
    """Choose kernels with the same bits each time, for the whole process; before cuBLAS is first used."""
    torch.set_num_threads(NUM_THREADS)
    set_deterministic(device)


def environment(device: torch.device) -> dict[str, str]:
    """The facts by name; equal facts, data and settings give equal bits."""
    facts = {
        "torch": torch.__version__,
        "how torch was built": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "the CPU's instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": str(torch.backends.mkldnn.enabled),
    }
    if not is_accelerator(device):
        return facts | {"the CPU": _cpu()}
    return facts | facts_of(device)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def exact_facts(
    num_chunks: int | None, ranks: Ranks, saved: Mapping[str, Any] | None, step: int
) -> dict[str, Any] | None:
    """What checkpoints and result.json say of an exact run; None if it is not exact.

    These are its `leaves`, `ground` (the environment), and `since` which step its bits have had them.

    Args:
        num_chunks: as in `train.exact`.
        saved: the same of the checkpoint of `step` that the run goes on from; None without one, or if its run
            was not exact. A difference is told once.
    """
    if num_chunks is None:
        return None
    here = {"leaves": num_chunks, "ground": environment(ranks.device), "since": step}
    if saved is None:
        return here
    then = saved["ground"] | {"train.exact": str(saved["leaves"])}
    now = environment(ranks.device) | {"train.exact": str(num_chunks)}
    differ = [name for name in sorted(then.keys() | now) if then.get(name) != now.get(name)]
    if not differ:
        return here | {"since": saved["since"]}
    if ranks.is_main:
        words = "; ".join(printable(f"{name} was {then.get(name)}, is {now.get(name)}") for name in differ)
        log.warning("train.exact: from step %d on, bits may differ from an unbroken run's: %s", step, words)
    return here
