"""Process-wide flags: torch's for fp32 precision and cuDNN on a GPU, the C library's for memory of a CPU."""

import ctypes

import torch

from trainer.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By their names in settings and commands."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def set_backend_flags(train: TrainConfig, device: torch.device) -> None:
    """Set the flags for what the process computes afterwards; a CPU's arithmetic is not affected."""
    if device.type != "cuda":
        _keep_freed_memory()
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"  # for convolutions
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def _keep_freed_memory() -> None:
    """Let the C library keep the memory that a step frees, for the next step.

    By default it returns it to the system, which hands it out again page by page: 3 % of the processor time
    of a small GPT, 8 % of a ViT-B. The peak grows by 0.5 %. Tensors above 32 MiB, the C library's own limit,
    are still returned. An allocator in its place, such as jemalloc, is not affected.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 32 * 2**20)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


def described(train: TrainConfig, device: torch.device) -> str:
    """The precision and the means of a step's computation, for the table at the start."""
    words = train.precision
    if device.type == "cuda":
        in_tf32 = train.precision == "fp32" and train.matmul_precision == "high"
        words += ", products in TF32" if in_tf32 else ""
        words += ", cudnn.benchmark" if train.cudnn_benchmark else ""
    words += ", channels last" if train.channels_last else ""
    mode = f" ({train.compile_mode})" if train.compile_mode != "default" else ""
    return words + (f", compiled{mode}" if train.compile else "")
