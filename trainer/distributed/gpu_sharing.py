"""Several ranks on one GPU (`distributed.ranks_per_gpu`), to try a run before its GPUs are available.

Since version 2.30, NCCL permits this with NCCL_MULTI_RANK_GPU_ENABLE=1, and the ranks of a host communicate
as on separate GPUs. Older versions reject two ranks that have the same GPU and the same host. With older
versions, each rank gets its own NCCL_HOSTID, and all ranks communicate through sockets, as if each had its
own host.
"""

import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import UserError

_SINCE = (2, 30)  # the NCCL version that added NCCL_MULTI_RANK_GPU_ENABLE
_MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"


def count_per_gpu(setting: int | str, num_gpus: int, hosts: Sequence[int]) -> int:
    """Return the number of consecutive local ranks that use the same GPU; it is the same on all ranks.

    Args:
        hosts: the index of each rank's host.
    """
    ranks_of_hosts = Counter(hosts)
    largest = max(ranks_of_hosts.values())
    if setting != "auto":
        return min(int(setting), largest)  # a run with fewer ranks shares less, or nothing
    if len(ranks_of_hosts) > 1:
        raise UserError(
            f"distributed.ranks_per_gpu=auto requires a single host, but this run has {len(ranks_of_hosts)}, "
            "which may have different numbers of GPUs; set it to a number"
        )
    return math.ceil(largest / num_gpus)


def environment(
    nccl_version: tuple[int, ...],
    ranks_per_gpu: int,
    rank: int,
    num_hosts: int,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to set before NCCL is initialized.

    Args:
        given: the environment of this process. Its values take precedence.

    Raises:
        UserError: `given` contains a value with which ranks can't share a GPU.
    """
    if ranks_per_gpu == 1:
        return {}
    # The kernels of different processes take turns on a GPU. The other protocols poll for each line of data.
    preferred = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    # NCCL itself recognizes a shared GPU only if the last two ranks share one, and otherwise tries NVLS.
    required = {"NCCL_NVLS_ENABLE": "0"}
    if nccl_version >= _SINCE:
        required["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if ranks_per_gpu > 2:  # each block of a collective occupies a multiprocessor
            preferred["NCCL_MAX_CTAS"] = "4"
    else:
        required["NCCL_HOSTID"] = f"{given.get('NCCL_HOSTID', socket.gethostname())}-rank{rank}"
        if num_hosts == 1:
            preferred |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in required.items():
        if name != "NCCL_HOSTID" and given.get(name, value) != value:
            raise UserError(
                f"{name}={given[name]} is not supported with distributed.ranks_per_gpu={ranks_per_gpu}; "
                f"unset {name}, or start one rank per GPU"
            )
    return {name: value for name, value in preferred.items() if name not in given} | required


def check_mps() -> None:
    """Raise UserError if NVIDIA's Multi-Process Service is running."""
    folder = os.environ.get(_MPS_FOLDER, "/tmp/nvidia-mps")
    if Path(folder, "control").exists():
        raise UserError(
            "ranks can't share a GPU under NVIDIA MPS (Multi-Process Service), whose daemon listens in "
            f"{folder}: a rank that is killed would end the other ranks, which then couldn't save; stop the "
            f"daemon (echo quit | nvidia-cuda-mps-control), or bypass it with {_MPS_FOLDER}=/dev/null"
        )
