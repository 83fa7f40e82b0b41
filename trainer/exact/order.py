"""Summation by chunks, with the same bits at any world size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from trainer.errors import UserError
from trainer.exact.buffers import ChunkBuffers
from trainer.exact.chunk_sums import ChunkSums, limit
from trainer.exact.digits import from_digits, to_digits
from trainer.exact.environment import NUM_THREADS
from trainer.exact.shard_sums import ShardSums
from trainer.exact.sum_checks import NO_CHECKS, SumChecks
from trainer.exact.sum_order import SumOrder
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.combined import parts_of
from trainer.optim.whole_tensors import whole_parts
from trainer.tensors.local_shard import num_rows

_ELEMENTWISE = (AdamW, Adam, SGD, RMSprop, NAdam)  # tested: shards of any size have the same bits


class ByChunks(SumOrder):
    """Adds gradients and losses as integers, chunk by chunk; chunks are fixed parts of each global batch."""

    by_chunks = True

    def __init__(self, num_chunks: int, where: str, checks: SumChecks = NO_CHECKS) -> None:
        self.checks = checks
        self.num_chunks, self._where, self.limit = num_chunks, where, limit(num_chunks)
        self._shards: Sequence[ShardSums] = ()
        self._reduces = False
        self._buffers: ChunkBuffers | None = None

    def sum_of(self, numbers: Sequence[Tensor]) -> Tensor:
        return to_digits(torch.stack(list(numbers)))

    def numbers(self, sums: Tensor) -> Tensor:
        return from_digits(sums)

    def mean_over(self, num_replicas: int) -> int:
        return 1

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        self._buffers = ChunkBuffers(model, self.num_chunks)
        self._shards, self._reduces = shards, reduces
        self.checks.attach(model)
        if not shards:
            self.sums = ChunkSums(_trainable(model), self.num_chunks, self.checks)

    def follow_trainable(self, model: nn.Module) -> None:
        trainable = _trainable(model)
        if self.sums is not None and not {*trainable.values()} <= self.sums.parameters:
            self.sums.follow(trainable)

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        on_cpu = any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        if on_cpu and any(group.get("fused") for group in optimizer.param_groups):
            raise UserError(
                "train.exact is not supported with optim.fused=true on a CPU, because the fused kernel "
                "rounds the last elements of a tensor differently; set optim.fused=null"
            )
        whole = {part.optimizer for part in whole_parts(optimizer)}
        for kind in map(type, set(parts_of(optimizer)) - whole):
            if sharded and kind not in _ELEMENTWISE:
                names = ", ".join(known.__name__ for known in _ELEMENTWISE)
                raise UserError(
                    f"train.exact is not supported with {kind.__name__} and strategy=fsdp, because fsdp "
                    "updates shards, and this optimizer may not update each element independently; use "
                    f"{names}, Muon, or strategy=ddp"
                )

    def begin_step(self) -> None:
        if (threads := torch.get_num_threads()) != NUM_THREADS:
            raise UserError(
                f"train.exact: {self._where} uses {threads} threads instead of {NUM_THREADS}, which changes "
                "the bits; remove torch.set_num_threads from your code"
            )
        self.checks.begin_step()
        for part in (self.sums, *self._shards):
            if part is not None:
                part.reset()

    def discard(self) -> None:
        assert self._buffers is not None
        self._buffers.discard()
        self.checks.begin_step()
        if self.sums is not None:
            self.sums.discard()
        for shard in self._shards:
            shard.reset()

    @contextmanager
    def chunk(self, last: bool) -> Iterator[None]:
        assert self._buffers is not None
        self._buffers.start_chunk()
        with self.checks.chunk():
            yield
            self._buffers.end_chunk()
            if self.sums is not None and not (last and self._reduces):
                self.sums.add_chunk()

    def finish(self) -> None:
        assert self._buffers is not None
        if self.sums is not None and not self._reduces:
            self.sums.write_gradients()
        self._buffers.finish()

    @torch.no_grad()
    def norm(self, trainable: TrainableParameters) -> Tensor:
        gradients = [own.grad for own in trainable.own.values() if own.grad is not None]
        if not gradients:
            return torch.zeros(())
        sums = to_digits(torch.cat([_row_squares(part).to(gradients[0].device) for part in gradients]))
        if trainable.group is not None:
            dist.all_reduce(sums, group=trainable.group)
        return from_digits(sums).sqrt().float()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _row_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of each row, added in an order that depends only on its length."""
    if not gradient.numel():
        return gradient.new_zeros(0, dtype=torch.float32)
    rows = gradient.float().square().reshape(num_rows(gradient.shape), -1)
    length = rows.shape[1]
    while length > 1:
        half = (length + 1) // 2
        rows[:, : length - half] += rows[:, half:length]
        length = half
    return rows[:, 0]
