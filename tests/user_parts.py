"""A user's own models, datasets and tasks, including faulty ones."""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.loggers import Logger
from trainer.tasks import Classification, Evaluation, Shown


class Stripes(Dataset[tuple[Tensor, Tensor]]):
    """Sample k is noise with the mean of its class. Has no `__getitems__` and no attributes for `auto`."""

    def __init__(self, split: str, num_samples: int = 128) -> None:
        generator = torch.Generator().manual_seed({"train": 1, "eval": 2}[split])
        self.labels = torch.arange(num_samples) % 2
        self.rows = torch.randn(num_samples, 6, generator=generator) + self.labels[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.labels[index]


class NanAt(Stripes):
    """Has NaN in one training sample."""

    def __init__(self, split: str, index: int) -> None:
        super().__init__(split)
        if split == "train":
            self.rows[index] = torch.nan


class StuckAt(Stripes):
    """Makes the process that reads training sample `index` loop or kill itself."""

    def __init__(self, split: str, index: int, how: str) -> None:
        super().__init__(split)
        self.index, self.how = index if split == "train" else -1, how

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.index:
            _act(self.how)
        return super().__getitem__(index)


class StuckWhenMade(Stripes):
    """Blocks in its constructor on rank 1, after the ranks have connected."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        while os.environ["RANK"] == "1":
            time.sleep(0.1)


class Tiny(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


class Normed(Tiny):
    """Has running statistics, which each rank computes from its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8))


class CountsPasses(Tiny):
    """Counts its passes in its extra state, on which a step depends."""

    passes = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "as tensors": [torch.tensor(float(self.passes))]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(rows) * (1 + 0.01 * self.passes)


class Decays(Tiny):
    """Changes a weight in its forward pass."""

    def forward(self, rows: Tensor) -> Tensor:
        self.layers[0].weight.data.mul_(0.99)
        return super().forward(rows)


class Unsaveable(Tiny):
    """Has a buffer that checkpoints do not support."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(6).to_sparse() if sparse else torch.ones(1).expand(6))


class HalfFrozen(nn.Module):
    """A model for digits: a frozen layer, running statistics, a head that every second pass does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.head, self.passes = nn.Linear(32, 10), 0

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(images.flatten(1))))
        self.passes += 1
        if self.passes % 2:
            return self.head(hidden)
        return nn.functional.linear(hidden, self.head.weight, self.head.bias)


class NanInItsLastRow(nn.Module):
    """A model for digits whose third loss after the dry run is finite, with a NaN in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.passes = nn.Linear(64, 10), 0

    def forward(self, images: Tensor) -> Tensor:
        scores = self.head(images.flatten(1))
        self.passes += self.training
        if self.training and self.passes == 4:
            scores = scores + (0 * self.head.weight[-1]).sqrt().sum()
        return scores


class FailsAt(Classification):
    """Fails in the given call of `loss` after the dry run, on the given rank, `times` times: by the value or
    only the gradient of the loss, a signal, a loop or an exit."""

    def __init__(self, rank: int, call: int, how: str, times: int = 1) -> None:
        super().__init__()
        self.here, self.call, self.how = int(os.environ.get("RANK", 0)) == rank, call + 1, how
        self.times = times

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        self.call -= 1
        if self.here and -self.times < self.call <= 0:
            if self.how == "slope":
                return loss + (0 * loss).sqrt()
            return loss + float(_act(self.how))
        return loss


def _act(how: str) -> str:
    """Execute the action `how`, unless it is a number."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "exit":
        sys.exit(7)
    while how == "loop":
        time.sleep(0.01)
    if how == "loop in C":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second waits for the first, and holds the interpreter
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    return how


class LeavesAThread(Classification):
    """Starts a thread that never ends and is not a daemon."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="uploader").start()


class SaysNoText(Classification):
    """Logs half a surrogate pair, which a broken tokenizer may produce."""

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        logging.getLogger("trainer").info("said \ud800")
        return Shown({"eval/text": "shown \ud800"})


class Noted:
    """A logger without a base class that records each call."""

    def __init__(self, run_dir: Path, word: str, **options: Any) -> None:
        self._file = (run_dir / "noted.jsonl").open("a")
        self._note("begin", word, sorted(options))

    def _note(self, *call: object) -> None:
        print(json.dumps(call), file=self._file, flush=True)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._note("scalars", values, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._note("text", name, step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._note("image", name, step)

    def figure(self, name: str, figure: Any, step: int) -> None:
        self._note("figure", name, step)

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        self._note("histogram", name, counts.tolist(), edges.tolist(), step)

    def close(self) -> None:
        self._note("close")


class Away(Logger):
    """A logger whose server does not answer."""

    def close(self) -> None:
        raise ConnectionError("no route")


class Deaf:
    """Not a logger."""

    def __init__(self, **options: Any) -> None: ...

    def scalars(self, values: dict[str, float], step: int) -> None: ...


class Scratch(nn.Sequential):
    """A linear model that also uses 64 MiB per sample."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(len(x) << 26, dtype=torch.uint8)  # pages that nobody touches
        return super().forward(x)
