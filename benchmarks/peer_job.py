"""The training job and the measurements that all trainers of `benchmarks.peers` share."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from models.gpt import GPT
from models.mlp import MLP
from trainer.data.digits import Digits
from trainer.data.text.in_memory import Text

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GPT_SCHEDULE = ("schedule.warmup_steps=0", "~schedule.final_fraction")
MORE_STEPS = 2  # number of steps of a resumed run


class Bytes(Text):
    """Text windows that start at the same positions in each epoch."""

    @property
    def draw(self) -> Any:  # type: ignore[override]
        raise AttributeError("draw")


class Job:
    """The model, optimizer, loss and settings, which are the same for all trainers."""

    def __init__(self, name: str) -> None:
        self.is_gpt = name == "gpt"
        self.batch, self.steps, self.log_every = (16, 100, 25) if self.is_gpt else (64, 2000, 50)
        self.data: Any = Bytes("train") if self.is_gpt else Digits("train")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(256, 128) if self.is_gpt else MLP((1, 8, 8), 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.is_gpt:
            return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def overrides(self) -> list[str]:
        """Return the job as settings of Ringmaster."""
        common = ["schedule=constant", "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "seed=0"]
        common += [
            f"strategy={'ddp' if WORLD > 1 else 'single'}",
            f"train.global_batch_size={self.batch * WORLD}",
        ]
        common += [f"train.log_every_steps={self.log_every}", "train.epochs=1000", "optim.weight_decay=0"]
        if self.is_gpt:
            return [
                "experiment=text_gpt",
                *common,
                "data.dataset._target_=benchmarks.peer_job.Bytes",
                *GPT_SCHEDULE,
            ]
        return [*common, "data.task.label_smoothing=0", "optim.lr=0.05"]


class Order(Sampler[list[int]]):
    """The indices of this rank's batches, starting at `first_step`, in Ringmaster's order."""

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._first_step = job, first_step
        self._per_epoch = len(job.data) // (job.batch * WORLD)

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch, or its remaining batches after a resume."""
        epoch, first = divmod(self._first_step, self._per_epoch)
        order = torch.randperm(len(self._job.data), generator=torch.Generator().manual_seed(epoch))
        for step in range(first, self._per_epoch):
            self._first_step += 1
            begin, size = step * self._job.batch * WORLD, self._job.batch * WORLD
            yield order[begin + RANK : begin + size : WORLD].tolist()


class BySamples(Dataset[Any]):
    """A dataset without `__getitems__`, like most datasets."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


class Measurements:
    """Records the measurements of a run; rank 0 writes them to a file."""

    def __init__(self, steps: int) -> None:
        self.num_steps = steps
        self.times: list[tuple[float, float]] = []
        self.first_at = 0.0
        self.values: dict[str, float] = {}

    def record_step(self) -> bool:
        """Record the end of a step, and return whether it was the last one."""
        self.times.append((time.perf_counter(), time.process_time()))
        self.first_at = self.first_at or time.time()
        return len(self.times) == self.num_steps

    def record_save(self, model: nn.Module, seconds: float) -> None:
        """Record the norm of the trained model, and the time of its checkpoint in seconds."""
        norm = torch.stack([parameter.detach().double().norm() for parameter in model.parameters()]).norm()
        self.values |= {"save": seconds, "norm": norm.item()}

    def write(self, out: Path) -> None:
        skipped = len(self.times) // 4
        (begin, cpu_begin), (end, cpu_end) = self.times[skipped], self.times[-1]
        number = len(self.times) - 1 - skipped
        self.values |= {
            "ms": 1e3 * (end - begin) / max(1, number),
            "cpu ms": 1e3 * (cpu_end - cpu_begin) / max(1, number),
            "first_at": self.first_at,
            "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if RANK == 0:
            out.write_text(json.dumps(self.values))
