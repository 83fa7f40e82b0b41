"""torch's flight recorder: the last collectives of a rank, beside its stack when a run fails.

`TORCH_FR_BUFFER_SIZE=N` in the environment of every rank has gloo and NCCL keep the last N.
"""

import contextlib
import os
from pathlib import Path

from torch._C import _distributed_c10d


def write(run_dir: Path | None, rank: int) -> None:
    """Write what was recorded to stacks/ of the run directory; never raises, since the process is to end."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)  # before torch 2.14 of NCCL alone
    if dump is None or run_dir is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return
    with contextlib.suppress(OSError, RuntimeError):
        (run_dir / "stacks").mkdir(exist_ok=True)
        (run_dir / "stacks" / f"rank{rank}.collectives.json").write_bytes(dump())
