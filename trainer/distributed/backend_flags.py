"""How exact fp32 is on a GPU and how cuDNN chooses: torch's own switches, set as the settings say."""

import torch

from trainer.config import TrainConfig


def set_backend_flags(train: TrainConfig, device: torch.device) -> None:
    """Choose for this process how a GPU computes; a CPU's arithmetic stays as it is.

    The switches are torch's, and hold for all that the process computes from now on.
    """
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"  # of convolutions
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def described(train: TrainConfig, device: torch.device) -> str:
    """How precisely, and by what means, a step is computed, for the table at the start."""
    words = train.precision
    if device.type == "cuda":
        in_tf32 = train.precision == "fp32" and train.matmul_precision == "high"
        words += ", products in TF32" if in_tf32 else ""
        words += ", cudnn.benchmark" if train.cudnn_benchmark else ""
    words += ", channels last" if train.channels_last else ""
    mode = f" ({train.compile_mode})" if train.compile_mode != "default" else ""
    return words + (f", compiled{mode}" if train.compile else "")
