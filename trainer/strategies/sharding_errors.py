"""Errors of torch's fully_shard that a model causes, explained with the way out."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.errors import UserError


@contextmanager
def forward_errors(param_dtype: torch.dtype) -> Iterator[None]:
    """Around a forward pass and the loss, in which parameters are gathered as `param_dtype`."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise UserError(
                f"strategy=fsdp: {_user_line(error)} uses a parameter of a unit, which is gathered only "
                "while the unit itself is called; add to the model's fsdp_units a module that contains "
                "this line's and all that it uses, or list fewer units; without fsdp_units, set "
                "strategy.unit_min_params above the size of that unit; and compute no gradient "
                "through a unit in the forward pass; or use strategy=ddp"
            ) from error
        if "appears to not have been used in the graph" in str(error):
            raise UserError(
                f"strategy=fsdp: {_user_line(error)} differentiates by what the outputs do not depend on, as "
                "by model.parameters(): outside of a forward pass these are shards; use strategy=ddp"
            ) from error
        if param_dtype != torch.float32 and "dtype" in str(error):
            raise UserError(
                f"strategy=fsdp: {_user_line(error)} mixes dtypes: {error}. Parameters are gathered, and "
                f"units' inputs cast, as {param_dtype}, but buffers keep their dtype; cast at that "
                "line, or use strategy.param_dtype=fp32, or strategy=ddp"
            ) from error
        raise


@contextmanager
def backward_errors() -> Iterator[None]:
    """Around a backward pass, in which a parameter of the loss may be sharded or freed."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise UserError(
                "strategy=fsdp: the loss uses parameters outside of the model's forward pass, where they are "
                "sharded, as a penalty over model.parameters() does; use optim.weight_decay, compute the "
                "penalty in the forward pass, or use strategy=ddp"
            ) from error
        if "out of bounds for storage of size 0" in str(error):
            raise UserError(
                "strategy=fsdp: the backward pass went a second time through a unit, whose parameters are "
                "freed after the first: a gradient of a gradient (torch.autograd.grad with create_graph) can "
                "be computed within a unit, but not through one; use strategy=ddp"
            ) from error
        raise


def _user_line(error: BaseException) -> str:
    """The innermost line outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = str(Path(torch.__file__).parent)
    at = next((frame for frame in reversed(frames) if not frame.filename.startswith(torchs)), frames[-1])
    return f"{at.filename}:{at.lineno} ({at.line})"
