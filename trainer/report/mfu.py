"""Model FLOPs utilisation (MFU): the fraction of the devices' peak FLOP/s that the model uses.

The FLOPs of a forward and a backward pass are counted, without recomputation for activation checkpointing.
Source: A. Chowdhery et al., "PaLM", 2022, appendix B.
"""

import copy
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.config import TrainConfig
from trainer.data.loading.batch import BatchSplit
from trainer.distributed.backend_flags import peak_is_tf32
from trainer.distributed.ranks import Ranks
from trainer.errors import first_line
from trainer.forward_backward import forward_backward
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.tasks import Task
from trainer.tensors.generators import generators_kept
from trainer.tensors.nested import mapped
from trainer.torch_private import fake_tensor_mode

log = logging.getLogger(__name__)

# TFLOP/s of dense matrix products from the vendors' data sheets: (fp16 and bf16, fp32 without TF32). The
# first entry applies whose name occurs in the device's name as whole words, since an L40 is not an L4.
_PEAKS = {
    "B200": (2250.0, 75.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "GH200": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "A6000": (155.0, 38.7),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "MI300X": (1307.0, 163.4),
}


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return the peak TFLOP/s of the device from the table; None for a CPU or an unknown GPU."""
    if not is_accelerator(device):
        return None
    name = accelerator.name(device)
    half, single = next(
        (peaks for part, peaks in _PEAKS.items() if re.search(rf"\b{part}\b", name)), (None, None)
    )
    if half is None or precision != "fp32":
        return half
    return half / 2 if peak_is_tf32(device) else single  # since Ampere, TF32 has half the peak of bf16


def model_flops(
    model: nn.Module,
    task: Task,
    train: TrainConfig,
    batch: BatchSplit,
    devices: Sequence[torch.device],
    ranks: Ranks,
) -> "ModelFlops | None":
    """Return a FLOP counter on rank 0; None on other ranks, or if the device's peak is unknown."""
    tflops = train.peak_tflops or peak_tflops(devices[0], train.precision)
    if tflops is None or not ranks.is_main:
        return None
    peak = tflops * 1e12 * ranks.world_size * len(devices)
    return ModelFlops(model, task, batch.num_micro_batches, peak, devices[0])


class ModelFlops:
    """Counts the FLOPs of one micro-batch with torch's FlopCounterMode, without computing anything.

    The tensors are fake and appear to be on `device`, so that attention selects the kernel for that device.
    The recomputation of scores in the backward pass of a fused kernel is counted.

    Args:
        model: the unwrapped model, on the CPU or the meta device; it is copied without its data.
        micro_batches: the number of micro-batches in a step, over all ranks.
        peak: peak FLOP/s of all devices together.
    """

    def __init__(
        self, model: nn.Module, task: Task, micro_batches: int, peak: float, device: torch.device
    ) -> None:
        self._fakes, self._device = fake_tensor_mode(), device
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            with self._fakes:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                memo[id(tensor)] = (
                    nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                )
        self._model: nn.Module | None = copy.deepcopy(model, memo)
        self._task, self._micro_batches, self._peak = task, micro_batches, peak
        self._per_step: float | None = None

    def see(self, batch: Any) -> None:
        """Count the FLOPs of the first micro-batch; later ones are assumed to have the same size."""
        if self._model is None:
            return
        model, self._model = self._model, None
        from torch.utils.flop_counter import FlopCounterMode  # takes 0.3 s, and is rarely needed

        try:
            with generators_kept(), self._fakes, FlopCounterMode(display=False) as counter:
                model.train()
                single = Strategy(self._device, ComputeOptions())
                faked = mapped(batch, self._faked)
                forward_backward(single, self._task, model, faked, lambda loss, _: loss)
            self._per_step = counter.get_total_flops() * self._micro_batches
        except Exception as error:  # a forward pass that needs values may raise anything
            reason = first_line(error)
            log.info("usage/mfu is not logged, because counting FLOPs on fake tensors failed: %s", reason)

    def _faked(self, value: Any) -> Any:
        return torch.empty_like(value, device=self._device) if isinstance(value, Tensor) else value

    def utilisation(self, step_s: float) -> float | None:
        """Return the fraction of the peak FLOP/s in a step of `step_s` seconds; None if FLOPs are unknown."""
        return None if self._per_step is None else self._per_step / step_s / self._peak
