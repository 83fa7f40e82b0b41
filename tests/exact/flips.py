"""Runs in which a rank flips a bit of an activation, a gradient, a weight, an integer sum or a message."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.mlp import MLP
from tests import runs
from trainer.tasks.classification import Classification

KINDS = ("activation", "gradient", "weight", "sum", "sent", "received")
BITS = {  # of fp32, of int64
    "sign": (31, 63),
    "exponent": (24, 44),
    "mantissa": (12, 30),
}


@dataclass
class Flip:
    """Bit flips on one rank.

    Args:
        kind: one of KINDS.
        bit: one of BITS.
        rank: the rank whose device produces wrong results.
        every: the mean number of values per flip; 1: every value is flipped.
        at: if set, flip only the value with this number, counted from 1.
    """

    kind: str
    bit: str
    rank: int
    every: int = 1
    at: int | None = None
    made: int = field(default=0, init=False)
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self}")

    def due(self) -> bool:
        self.seen += 1
        due = self.seen == self.at if self.at is not None else self._draw.random() < 1 / self.every
        self.made += due
        return due

    @torch.no_grad()
    def apply(self, tensor: Tensor) -> None:
        """Flip the bit of the first element, in memory."""
        bits = tensor.detach().view(torch.int64 if tensor.dtype == torch.int64 else torch.int32)
        number = 1 << BITS[self.bit][tensor.dtype == torch.int64]
        first = bits.as_strided((1,), (1,))
        first ^= number - (1 << 64) * (number >> 63) if bits.dtype == torch.int64 else _signed(number)


def _signed(number: int) -> int:
    return number - (1 << 32) * (number >> 31)


@contextlib.contextmanager
def flipping(flip: Flip) -> Iterator[None]:
    """Flip bits in this process."""
    from trainer.comm.ddp_hook import CommHook
    from trainer.exact import shard_sums
    from trainer.exact.chunk_sums import Encoder, Message
    from trainer.guards.verification import GradientVerification
    from trainer.tensors.local_shard import to_local

    def after(owner: Any, name: str, then: Callable[..., None]) -> None:
        """Call `then` after each call of a function."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if flip.due():
                then(*args)
            return result

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, wrapped)

    def before(owner: Any, name: str, then: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if flip.due():
                then(*args)
            return original(*args, **kwargs)

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, wrapped)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        """Flip bits of the last layer in training."""
        is_last = isinstance(module, nn.Linear) and module.out_features == 10 and torch.is_grad_enabled()
        if not is_last or not output.requires_grad or not flip.due():
            return None
        if flip.kind == "activation":
            changed = output.clone()
            flip.apply(changed)
            return changed

        def on_gradient(gradient: Tensor) -> Tensor:
            changed = gradient.clone()
            flip.apply(changed)
            return changed

        output.register_hook(on_gradient)
        return None

    def flip_weight(verification: GradientVerification, *_: Any) -> None:
        model = verification._strategy.unwrap(verification._model)
        local = [to_local(p.detach()) for p in model.parameters() if p.ndim > 1]
        flip.apply(next(each for each in reversed(local) if each.numel()))

    with contextlib.ExitStack() as undo:
        if flip.kind in ("activation", "gradient"):
            handle = nn.modules.module.register_module_forward_hook(hook)
            undo.callback(handle.remove)
        elif flip.kind == "weight":
            before(GradientVerification, "start", flip_weight)
        elif flip.kind == "sum":
            after(Encoder, "add", lambda encoder, sums, count, gradient: flip.apply(sums))
        elif flip.kind == "sent":
            before(CommHook, "_reduced", lambda hook, message, record: flip.apply(message.buffer()))
            before(shard_sums, "reduce_scatter_single", lambda output, sent, group: flip.apply(sent))
        else:
            before(Message, "decoded", lambda message: flip.apply(message.buffer()))
            after(shard_sums, "reduce_scatter_single", lambda output, *_: flip.apply(output))
        yield


@dataclass
class Found:
    """The result of a run: reported ranks and contents of failure.json; [] and {} if no error was found."""

    flips: int
    ranks: list[int]
    suspect: dict[str, Any]
    message: str
    steps: int


def found_each(*cases: tuple[Flip, tuple[str, ...]]) -> list[Found]:
    """Train once for each case, on this rank."""
    from trainer.errors import RunEndError

    results = []
    for flip, overrides in cases:
        flips = flipping(flip) if os.environ["RANK"] == str(flip.rank) else contextlib.nullcontext()
        found = Found(0, [], {}, "", 0)
        with contextlib.redirect_stdout(io.StringIO()), flips:
            try:
                found.steps = runs.train(*overrides)["steps"]
            except RunEndError as error:
                suspect = dict(error.facts.get("suspect", {}))
                named = [suspect] if suspect.get("rank") is not None else suspect.get("candidates", [])
                found = Found(
                    0, [each["rank"] for each in named], suspect, str(error), suspect.get("step", 0)
                )
                dist.destroy_process_group()
        found.flips = flip.made
        results.append(found)
    return results


class FlippingMLP(MLP):
    """Flips a bit of its logits on rank `rank` in training pass `at`, once per `marker`."""

    def __init__(self, marker: str, at: int, rank: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._marker, self._flip = Path(marker), Flip("activation", "mantissa", rank, at=at)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if not torch.is_grad_enabled() or os.environ.get("RANK") != str(self._flip.rank):
            return logits
        if self._flip.due() and not self._marker.exists():
            self._marker.touch()
            logits = logits.clone()
            self._flip.apply(logits)
        return logits


class Noisy(Classification):
    """Adds noise, whose strength `begin_step` sets, to the batch itself."""

    def begin_step(self, step: int, last_step: int) -> None:
        self.strength = 0.5

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].add_(self.strength * torch.randn_like(batch[0]))
        return super().loss(model, batch)
