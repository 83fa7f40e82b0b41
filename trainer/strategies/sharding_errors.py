"""Errors of torch's fully_shard that a model causes, explained with the way out."""

import traceback
from pathlib import Path

import torch

from trainer.errors import UserError


def explained(error: Exception, in_backward: bool, param_dtype: torch.dtype) -> UserError | None:
    """What an error in a forward or a backward pass means, if known.

    Args:
        param_dtype: in which parameters are gathered.
    """
    said = str(error)
    if "mixed torch.Tensor and DTensor" in said and in_backward:
        return UserError(
            "strategy=fsdp: the loss uses parameters outside of the model's forward pass, where they are "
            "sharded, as a penalty over model.parameters() does; use optim.weight_decay, compute the "
            "penalty in the forward pass, or use strategy=ddp"
        )
    if "mixed torch.Tensor and DTensor" in said:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} uses a parameter of a unit, which is gathered only "
            "while the unit itself is called; add to the model's fsdp_units a module that contains "
            "this line's and all that it uses, or list fewer units; without fsdp_units, set "
            "strategy.unit_min_params above the size of that unit; and compute no gradient "
            "through a unit in the forward pass; or use strategy=ddp"
        )
    if "appears to not have been used in the graph" in said:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} differentiates by what the outputs do not depend on, as "
            "by model.parameters(): outside of a forward pass these are shards; use strategy=ddp"
        )
    if "out of bounds for storage of size 0" in said:
        return UserError(
            "strategy=fsdp: the backward pass went a second time through a unit, whose parameters are "
            "freed after the first: a gradient of a gradient (torch.autograd.grad with create_graph) can "
            "be computed within a unit, but not through one; use strategy=ddp"
        )
    if param_dtype != torch.float32 and isinstance(error, RuntimeError) and "dtype" in said:
        return UserError(
            f"strategy=fsdp: {_user_line(error)} mixes dtypes: {error}. Parameters are gathered, and "
            f"units' inputs cast, as {param_dtype}, but buffers keep their dtype; cast at that "
            "line, or use strategy.param_dtype=fp32, or strategy=ddp"
        )
    return None


def _user_line(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = str(Path(torch.__file__).parent)
    at = next((frame for frame in reversed(frames) if not frame.filename.startswith(torchs)), frames[-1])
    return f"{at.filename}:{at.lineno} ({at.line})"
