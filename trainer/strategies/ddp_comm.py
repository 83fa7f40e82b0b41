"""What DDP reduces and how: what comm=auto chooses, and the settings of `comm`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from trainer.comm.executor import SUMMED_DTYPES
from trainer.config import AutoCommConfig, CommConfig, HookCommConfig, NativeCommConfig, ScheduleCommConfig
from trainer.config.instantiate import instantiate
from trainer.optim.optimizers import sparse_weights


def auto_choice(comm: AutoCommConfig, model: nn.Module, hosts: Sequence[int]) -> CommConfig:
    """What comm=auto is here (a collective): `tree` for two ranks on the CPUs of one host, else `native`.

    Through shared memory `tree` takes 0.7 of the CPU time of gloo's all-reduce for large buckets, and
    as much for small ones. It has no half-precision sums and no mode without a hook. More than two ranks
    keep `native`: the bits of a sum of three depend on the order, and a run must continue with the same bits
    on other hosts.
    Sparse gradients have other indices on each rank: only DDP itself adds them, without a hook.

    Args:
        hosts: the host of each rank.
    """
    if sparse_weights(model) and comm.wire_dtype == "fp32":
        return NativeCommConfig("native", "fp32", timeline=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    two_on_cpus = len(hosts) == 2 and {p.device.type for p in trained} == {"cpu"}
    asks_for_native = comm.wire_dtype != "fp32" or not comm.timeline
    adds_up = {p.dtype for p in trained} <= {*SUMMED_DTYPES}
    if two_on_cpus and adds_up and not asks_for_native and len({*hosts}) == 1:
        return ScheduleCommConfig("tree", "fp32", segment_mb=None)
    return NativeCommConfig("native", comm.wire_dtype, comm.timeline)


def hook_options(comm: CommConfig, always: bool) -> dict[str, Any] | None:
    """The arguments of `attach` that follow from `comm`; None if no hook is needed.

    Args:
        always: whether one is needed for another reason than `comm`.
    """
    match comm:
        case ScheduleCommConfig():
            return {"wire_dtype": comm.wire_dtype, "segment_mb": comm.segment_mb}
        case HookCommConfig():
            return {}  # beside the hook itself
        case NativeCommConfig() if always or comm.timeline or comm.wire_dtype != "fp32":
            return {"wire_dtype": comm.wire_dtype}
    return None


def users_hook(node: dict[str, Any]) -> Callable[[dist.GradBucket], Future[Tensor]]:
    """The communication hook that `comm.hook` names, with its state; the process group must be there.

    Raises:
        UserError: the hook or its state cannot be built.
    """
    own = dict(node)
    state = own.pop("state", None)
    hook = instantiate("comm.hook", own | {"_partial_": True})
    if isinstance(state, dict) and "_target_" in state:
        state = instantiate("comm.hook.state", state)
    return partial(hook, state)
