"""DDP options for the settings in `comm`, and the choice that comm=auto makes."""

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
    """Return the choice of comm=auto: `tree` for two ranks on the CPUs of one host, otherwise `native`.

    Through shared memory, `tree` takes 0.7 times the CPU time of gloo's all-reduce for large buckets and the
    same time for small buckets, but it needs a hook and does not add in half precision. Runs with more than
    two ranks use `native`: the bits of a sum of three depend on the order, and must not change when a run
    continues on other hosts. Sparse gradients have different indices on each rank, and only DDP without a
    hook adds them.
    """
    if sparse_weights(model) and comm.wire_dtype == "fp32":
        return NativeCommConfig("native", "fp32", timeline=False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    two_on_cpus = len(hosts) == 2 and {p.device.type for p in trainable} == {"cpu"}
    needs_native = comm.wire_dtype != "fp32" or not comm.timeline
    can_be_summed = {p.dtype for p in trainable} <= {*SUMMED_DTYPES}
    if two_on_cpus and can_be_summed and not needs_native and len({*hosts}) == 1:
        return ScheduleCommConfig("tree", "fp32", segment_mb=None)
    return NativeCommConfig("native", comm.wire_dtype, comm.timeline)


def hook_options(comm: CommConfig, always: bool) -> dict[str, Any] | None:
    """Return the arguments of `attach` for `comm`; None if no hook is needed.

    Args:
        always: whether a hook is needed for a reason other than `comm`.
    """
    match comm:
        case ScheduleCommConfig():
            return {"wire_dtype": comm.wire_dtype, "segment_mb": comm.segment_mb}
        case HookCommConfig():
            return {}  # the caller adds the hook itself
        case NativeCommConfig() if always or comm.timeline or comm.wire_dtype != "fp32":
            return {"wire_dtype": comm.wire_dtype}
    return None


def users_hook(node: dict[str, Any]) -> Callable[[dist.GradBucket], Future[Tensor]]:
    """Return the communication hook that `comm.hook` names, bound to its state.

    Call it after the process group has been initialized, because the state may use the group.
    """
    own = dict(node)
    state = own.pop("state", None)
    hook = instantiate("comm.hook", own | {"_partial_": True})
    if isinstance(state, dict) and "_target_" in state:
        state = instantiate("comm.hook.state", state)
    return partial(hook, state)
