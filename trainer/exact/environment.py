"""The environment of an exact run: the facts that determine its bits, apart from settings and data."""

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
    """Select deterministic kernels for the whole process. Call before cuBLAS is first used."""
    torch.set_num_threads(NUM_THREADS)
    set_deterministic(device)


def environment(device: torch.device) -> dict[str, str]:
    """Return the facts by name. Runs with equal facts, data and settings have equal bits."""
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
    """Return the facts of an exact run for checkpoints and result.json; None if it is not exact.

    They are `leaves`, the number of chunks; `ground`, the environment; and `since`, the step from which on
    neither has changed. Rank 0 logs a warning if they differ from those in the checkpoint.
    """
    if num_chunks is None:
        return None
    facts = {"leaves": num_chunks, "ground": environment(ranks.device), "since": step}
    if saved is None:
        return facts
    before = saved["ground"] | {"train.exact": str(saved["leaves"])}
    now = environment(ranks.device) | {"train.exact": str(num_chunks)}
    differ = [name for name in sorted(before.keys() | now) if before.get(name) != now.get(name)]
    if not differ:
        return facts | {"since": saved["since"]}
    if ranks.is_main:
        changes = "; ".join(printable(f"{n} was {before.get(n)}, and is now {now.get(n)}") for n in differ)
        log.warning(
            "train.exact: from step %d on, bits may differ from an uninterrupted run: %s", step, changes
        )
    return facts
