"""Process-wide flags of torch for fp32 precision and cuDNN on a GPU."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By their names in settings and commands."""


def set_backend_flags(train: "TrainConfig", device: torch.device) -> None:
    """Set the flags for what the process computes afterwards; a CPU has none."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"  # for convolutions
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def described(train: "TrainConfig", device: torch.device) -> str:
    """The precision and the means of a step's computation, for the table at the start."""
    words = train.precision
    if device.type == "cuda":
        in_tf32 = train.precision == "fp32" and train.matmul_precision == "high"
        words += ", products in TF32" if in_tf32 else ""
        words += ", cudnn.benchmark" if train.cudnn_benchmark else ""
    words += ", channels last" if train.channels_last else ""
    mode = f" ({train.compile_mode})" if train.compile_mode != "default" else ""
    return words + (f", compiled{mode}" if train.compile else "")
