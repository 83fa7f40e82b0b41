"""Process-wide flags: of torch for fp32 precision and cuDNN on a GPU, and of the C library's memory."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from trainer import accelerator, torch_private
from trainer.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By their names in settings and commands."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_M_MMAP_THRESHOLD = -3  # of malloc.h


def set_backend_flags(train: TrainConfig, device: torch.device) -> None:
    """Set the flags for what the process computes afterwards; a CPU has none."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(train.matmul_precision)
    torch.backends.cudnn.allow_tf32 = train.matmul_precision != "highest"  # for convolutions
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def set_deterministic(device: torch.device) -> None:
    """Choose kernels of CUDA with the same bits each time; before cuBLAS is first used."""
    if device.type != "cuda":
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would take a kernel for each torch.empty.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def return_large_blocks(device: torch.device) -> None:
    """Have glibc return each freed block of 1 MiB or more to the system at once, on a CPU.

    By itself it raises that limit to the largest block freed, up to 32 MiB, and keeps what is below. Units of
    FSDP are gathered and freed in many sizes: of 100 million parameters on two ranks, each rank then kept
    1.5 GB. Other C libraries do not know `mallopt`.
    """
    if device.type == "cpu" and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def facts_of(device: torch.device) -> dict[str, str]:
    """What decides the bits that an accelerator computes, beside torch itself, by name."""
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
    """Whether matrix products of fp32 are computed in TF32."""
    if device.type != "cuda":
        return False
    return torch.backends.cuda.matmul.allow_tf32 and torch.cuda.get_device_capability(device) >= (8, 0)


def record_memory_history(device: torch.device) -> None:
    """Note each allocation from now on, on CUDA."""
    if device.type == "cuda":
        torch_private.record_memory_history(max_entries=200_000)


def write_memory_history(device: torch.device, file: Path) -> None:
    """Write what was noted, and note no more."""
    if device.type == "cuda":
        torch_private.write_memory_history(file)
        torch_private.record_memory_history(max_entries=None)


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
