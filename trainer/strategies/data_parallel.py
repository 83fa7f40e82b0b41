"""torch.nn.DataParallel: one process drives all GPUs of its host."""

import torch
from torch import nn

from trainer.strategies.base import Fill, Strategy


class DataParallel(Strategy):
    """Scatter each batch over the GPUs, replicate the model at every step, gather the outputs on GPU 0."""

    def __init__(self, device: torch.device, precision: str, compile_model: bool) -> None:
        super().__init__(device, precision, compile_model)
        if device.type == "cuda":
            self.devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if len(self.devices) > 1:
            self.notes.append(
                f"dp: outputs are gathered on {self.devices[0]}, which needs more memory than the other "
                f"{len(self.devices) - 1}, and the model is copied to them at every step; ddp does neither"
            )
        else:
            self.notes.append(f"dp: nn.DataParallel needs two GPUs; this run is one model on {device}")

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        model = super().wrap(model, fill)
        return nn.DataParallel(model, device_ids=self.devices) if len(self.devices) > 1 else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, nn.DataParallel) else model
