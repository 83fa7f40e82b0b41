"""Set process-wide flags: fp32 precision and cuDNN on a GPU, and the C library's allocator on a CPU."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from trainer import accelerator, torch_private
from trainer.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in settings and commands."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_M_MMAP_THRESHOLD = -3  # from <malloc.h>


def set_backend_flags(train: TrainConfig, device: torch.device) -> None:
    """Set torch's precision flags and cuDNN autotuning. Do nothing on a CPU."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"  # for convolutions
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def set_deterministic(device: torch.device) -> None:
    """Select deterministic CUDA kernels. Call before cuBLAS is first used."""
    if device.type != "cuda":
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling would launch a kernel for each torch.empty.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def return_large_blocks(device: torch.device) -> None:
    """On a CPU, make glibc return each freed block of at least 1 MiB to the system immediately.

    By default, glibc raises this threshold to the size of the largest freed block, up to 32 MiB, and keeps
    smaller blocks. FSDP gathers and frees units of many sizes: with 100 million parameters on two ranks, each
    rank kept 1.5 GB. Other C libraries do not have `mallopt`.
    """
    if device.type == "cpu" and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def facts_of(device: torch.device) -> dict[str, str]:
    """Return the properties of `device` that affect its results, by name, apart from torch's version."""
    if device.type != "cuda":
        return {"the GPU": accelerator.name(device)}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "the GPU": f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "TF32 in convolutions": str(torch.backends.cudnn.allow_tf32),
        _CUBLAS: os.environ.get(_CUBLAS, ""),
    }


def peak_is_tf32(device: torch.device) -> bool:
    """Return whether fp32 matrix products are computed in TF32."""
    if device.type != "cuda":
        return False
    return torch.backends.cuda.matmul.allow_tf32 and torch.cuda.get_device_capability(device) >= (8, 0)


def record_memory_history(device: torch.device) -> None:
    if device.type == "cuda":
        torch_private.record_memory_history(max_entries=200_000)


def write_memory_history(device: torch.device, file: Path) -> None:
    """Write the recorded allocations to `file` and stop recording."""
    if device.type == "cuda":
        torch_private.write_memory_history(file)
        torch_private.record_memory_history(max_entries=None)


def described(train: TrainConfig, device: torch.device) -> str:
    """Describe the precision and related flags, for the table at the start of a run."""
    words = train.precision
    if device.type == "cuda":
        in_tf32 = train.precision == "fp32" and train.matmul_precision == "high"
        words += ", products in TF32" if in_tf32 else ""
        words += ", cudnn.benchmark" if train.cudnn_benchmark else ""
    words += ", channels last" if train.channels_last else ""
    mode = f" ({train.compile_mode})" if train.compile_mode != "default" else ""
    return words + (f", compiled{mode}" if train.compile else "")
