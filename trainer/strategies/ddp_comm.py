"""Which all-reduce DDP uses: what comm=auto chooses, and how the settings of `comm` reach `attach`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainer.comm.sparse import sparse_parameters
from trainer.comm.transport.bucket_layout import SUMMED_DTYPES
from trainer.comm.transport.mailbox import reach
from trainer.config import (
    AutoCommConfig,
    CommConfig,
    NativeCommConfig,
    PowerSgdCommConfig,
    ScheduleCommConfig,
)
from trainer.distributed.agreement import gather_objects


def auto_choice(comm: AutoCommConfig, model: nn.Module, hosts: Sequence[int]) -> CommConfig:
    """What comm=auto is here (a collective): `tree` for two ranks on the CPUs of one host, else `native`.

    `tree` moves a small model's gradients faster than gloo's all-reduce, through shared memory. It cannot add
    sparse gradients, and has neither half-precision sums nor a mode without a hook. More than two ranks keep
    `native`: a sum of three has other bits in another order, and a run that is resumed on other hosts must
    continue with the same bits.

    Args:
        hosts: the host of each rank.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    two_on_one_host = len(hosts) == 2 and len({*hosts}) == 1 and {p.device.type for p in trained} == {"cpu"}
    asks_for_native = comm.wire_dtype != "fp32" or not comm.timeline
    adds_up = not sparse_parameters(model) and {p.dtype for p in trained} <= {*SUMMED_DTYPES}
    # Two containers of one machine share no memory, even if they have the same name.
    if two_on_one_host and adds_up and not asks_for_native and len({*gather_objects(reach())}) == 1:
        return ScheduleCommConfig("tree", "fp32", segment_mb=None)
    return NativeCommConfig("native", comm.wire_dtype, comm.timeline)


def hook_options(comm: CommConfig, always: bool = False) -> dict[str, Any] | None:
    """The arguments of `attach` that follow from `comm`; None if no hook is needed.

    Args:
        always: whether one is needed for another reason than `comm`.
    """
    match comm:
        case ScheduleCommConfig():
            return {"wire_dtype": comm.wire_dtype, "segment_mb": comm.segment_mb}
        case PowerSgdCommConfig():
            state = {
                "matrix_approximation_rank": comm.matrix_approximation_rank,
                "start_powerSGD_iter": comm.start_step,
                "min_compression_rate": comm.min_compression_rate,
                "use_error_feedback": comm.use_error_feedback,
                "warm_start": comm.warm_start,
            }
            return {"powersgd": state}
        case NativeCommConfig() if always or comm.timeline or comm.wire_dtype != "fp32":
            return {"wire_dtype": comm.wire_dtype}
    return None
