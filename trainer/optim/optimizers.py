"""Which optimizers are supported; several as one; Muon for sharded matrices, which it needs whole."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adafactor, Muon, Optimizer

from trainer.errors import UserError
from trainer.optim.trained import Trained


class CombinedOptimizer(Optimizer):
    """Has the parameter groups and the state of all `parts`, which share them: to others it is one optimizer.

    Args:
        parts: with different parameters, new: without state.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for part in self.parts:
            part.step()
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's load_state_dict ends with it
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            own = [next(groups) for _ in part.param_groups]
            part.__setstate__({"state": self.state, "param_groups": own})


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer that updates each parameter group."""
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return [part for part in parts for _ in part.param_groups]


def has_user_part(optimizer: Optimizer) -> bool:
    """Whether a part is neither torch's nor this project's."""
    packages = {type(part).__module__.partition(".")[0] for part in parts_of(optimizer)}
    return not packages <= {"torch", "trainer"}


def check_optimizer(optimizer: Optimizer, is_sharded: bool = False) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step.

    Or, if `is_sharded`, for the one of torch's that needs whole tensors and gets rows; Muon gathers them.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or any optimizer whose step() needs no closure"
        )
    if is_sharded and isinstance(optimizer, Adafactor):
        raise UserError(
            f"optim: {name} updates a row of a tensor by sums over its other rows, but under strategy=fsdp a "
            "rank's optimizer has its own rows alone; use strategy=ddp, or optim=adamw"
        )
    if is_sharded and type(optimizer).__module__ == "torchao.optim.adam":  # others: `Trained.as_rows`
        raise UserError(
            f"optim: {name} keeps its state in blocks of numbers, which no checkpoint can cut into shards of "
            "other sizes; under strategy=fsdp use optim=adamw, or strategy=ddp"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


_MOMENTUM = "momentum_buffer"  # the key of Muon's state


class WholeMatrices(Muon):
    """Muon's steps on whole matrices, whose shards, and those of their momentum, stay where they are.

    Of as many matrices as there are shards each rank updates one: it receives the shards of weight, momentum
    and gradient, takes torch's own step, and sends weight and momentum back. So each update is computed once.
    A rank needs the memory of some whole matrices, and sends and receives 5 times its shards.

    Args:
        muon: new, of shards in `trained`. Its groups become those of this one.
    """

    def __init__(self, muon: Muon, trained: Trained) -> None:
        super().__init__(muon.param_groups)
        assert trained.group is not None
        self._trained, self._group = trained, trained.group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """(A collective of the ranks of the shards.)"""
        num_shards = self._group.size()
        for group in self.param_groups:
            shards = [parameter for parameter in group["params"] if parameter.grad is not None]
            for dtype in dict.fromkeys(shard.dtype for shard in shards):
                alike = [shard for shard in shards if shard.dtype == dtype]
                for first in range(0, len(alike), num_shards):
                    self._update(group, alike[first : first + num_shards])

    def _update(self, group: dict[str, Any], shards: Sequence[nn.Parameter]) -> None:
        """Update at most as many matrices as there are shards: rank r computes that of number r."""
        ranks, rank, num_shards = self._group, self._group.rank(), self._group.size()
        rows = [len(self._trained.whole[self._trained.names[shard]]) for shard in shards]
        held = [self._held(shard) for shard in shards]
        # (weight and momentum and gradient, rows, columns), with as many rows as the longest shard.
        packed = [
            F.pad(torch.stack(parts), (0, 0, 0, -(-number // num_shards) - len(parts[0])))
            for number, parts in zip(rows, held, strict=True)
        ]
        nothing = packed[0].new_empty(0)
        packed += [nothing] * (num_shards - len(shards))
        received = _exchanged(packed, [packed[rank].shape] * num_shards, ranks)
        updated = [nothing] * num_shards
        if rank < len(shards):
            whole = torch.cat(received, dim=1)
            _step(group, *whole[:, : rows[rank]])
            updated = list(whole[:2].chunk(num_shards, dim=1))
        received = _exchanged(updated, [part[:2].shape for part in packed], ranks)
        for parts, pair in zip(held, received, strict=False):
            for own, new in zip(parts, pair, strict=False):
                own.copy_(new[: len(own)])

    def _held(self, shard: nn.Parameter) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the weight, its momentum and its gradient."""
        state = self.state[shard]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(shard)  # as Muon begins
        assert shard.grad is not None
        return shard, state[_MOMENTUM], shard.grad


def _step(group: dict[str, Any], weight: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """Update weight and momentum in place by a step of Muon with the options of `group`."""
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    muon = Muon([{**group, "params": [parameter]}])
    muon.state[parameter][_MOMENTUM] = momentum
    muon.step()


def _exchanged(
    sent: Sequence[Tensor], shapes: Sequence[torch.Size], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Send each rank its tensor, and return what each sent here, of these shapes (a collective)."""
    sizes = [shape.numel() for shape in shapes]
    received = sent[0].new_empty(sum(sizes))
    message = torch.cat([part.reshape(-1) for part in sent])
    dist.all_to_all_single(received, message, sizes, [part.numel() for part in sent], group=ranks)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
