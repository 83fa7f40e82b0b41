"""Find a device that produces wrong results: another rank recomputes a chunk, and the bits must match.

Gradients are added over ranks, so a silent error on one device affects every replica in the same way. With
`train.exact`, any rank computes the bits of any chunk, so two ranks can be compared without a threshold, even
if the device repeats its error.
"""

import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer import accelerator
from trainer.data.device import ToDevice
from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import all_gather_single, gloo_group, sum_over_ranks
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, WrongResultError, first_few
from trainer.exact.sum_checks import LinearChecks
from trainer.forward_backward import forward_backward
from trainer.strategies.base import Strategy
from trainer.tasks import Task
from trainer.tasks.label_counts import divided
from trainer.tensors.bits import bit_hash, bit_sum
from trainer.tensors.generators import seed_micro_batch
from trainer.tensors.local_shard import to_local

Hashes = tuple[int, ...]
"""The hash of each parameter's gradient in a chunk."""


class Verification:
    """The interface of `GradientVerification`, for runs that do not verify their gradients.

    Attributes:
        verified_step: the last step whose verification has passed; None if nothing is verified.
    """

    verified_step: int | None = None

    def start(self, step: int, micro_batches: Sequence[Any], num_labels: Callable[[], float]) -> None:
        """Recompute the chunk of another rank, if that is due (a collective).

        Called before the first micro-batch of a step.

        Args:
            micro_batches: those of this rank, on the CPU.
            num_labels: returns the number of labels in all chunks of the step, except ignored ones.
        """

    def check(self, step: int) -> None:
        """Compare with other ranks, after the micro-batches of a step, before its update (a collective).

        Raises:
            WrongResultError: on every rank, if a rank computed, received or kept wrong numbers.
        """

    def after_update(self) -> None:
        """Called when the weights of the next step are complete."""

    def weights_may_change(self) -> AbstractContextManager:
        """Return the context of a change to weights other than the update."""
        return nullcontext()


class GradientVerification(Verification):
    """Compares the gradient of one chunk of each rank with another rank's recomputation every few steps.

    The recomputation comes first in a step, when no parameter has a gradient and buffers have the values from
    which each chunk starts. In every step, this also compares the sums that ranks received with the sums that
    were sent and, under fsdp, each rank's shards with their bits after the last update. This takes one
    all-reduce of a number per rank, for which the CPU waits.

    Args:
        every: steps between recomputations.
        chunks: the indices of each rank's chunks.
        count: returns the number of labels in a batch, except ignored ones.
        verified_step: see `Verification`.
        set_aside: called on every rank with `verified_step` and a reason before the error: resume=auto must
            skip the checkpoints of later steps.
    """

    def __init__(
        self,
        every: int,
        ranks: Ranks,
        strategy: Strategy,
        task: Task,
        model: nn.Module,
        chunks: Sequence[range],
        to_device: ToDevice,
        count: Callable[[Any], float],
        seed: int,
        timeout_s: float,
        verified_step: int,
        set_aside: Callable[[int, str], None],
    ) -> None:
        if ranks.world_size < 2:
            raise UserError(
                f"train.verify_every={every} needs at least 2 ranks, because another rank recomputes a "
                "chunk; start more processes, or set train.verify_every=null"
            )
        assert isinstance(strategy.order.checks, LinearChecks)
        self._every, self._ranks, self._strategy, self._task = every, ranks, strategy, task
        self._model, self._chunks, self._to_device, self._count = model, chunks, to_device, count
        self._seed, self.verified_step, self._set_aside = seed, verified_step, set_aside
        self._checks = strategy.order.checks
        self._names = [name for name, _ in strategy.unwrap(model).named_parameters()]
        self._group = gloo_group(timeout_s)
        self._shards = ShardCheck(strategy.unwrap(model)) if strategy.gradients_differ else None
        self._offsets = offsets(ranks.hosts)
        self._offset = 0
        self._sent = b""  # the batch of this rank's chunk that another rank recomputes, before it is used
        self._num_labels = 0.0
        self._recomputed: Tensor | None = None

    def start(self, step: int, micro_batches: Sequence[Any], num_labels: Callable[[], float]) -> None:
        self._recomputed = None
        self._checks.observed = None
        if step % self._every:
            return
        rank, turn = self._ranks.rank, step // self._every
        most = max(map(len, self._chunks))
        self._offset = self._offsets[turn // most % len(self._offsets)]
        self._turn, self._num_labels = turn, num_labels()
        own = turn % len(self._chunks[rank])
        self._sent = pickle.dumps(micro_batches[own])
        self._recomputed = self.recompute(self._exchanged(), self._chunk_of(self._partner(rank)), step)
        self._checks.observed = own

    def _partner(self, rank: int) -> int:
        return (rank + self._offset) % self._ranks.world_size

    def _chunk_of(self, rank: int) -> int:
        return self._chunks[rank][self._turn % len(self._chunks[rank])]

    def _exchanged(self) -> Any:
        """Send this rank's batch to the rank that recomputes it, and return the partner's batch."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        target, source = (rank - self._offset) % world_size, self._partner(rank)
        own = torch.frombuffer(bytearray(self._sent), dtype=torch.uint8)
        sends = [dist.isend(part, target, self._group) for part in (torch.tensor([len(own)]), own)]
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, self._group)
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, source, self._group)
        for send in sends:
            assert send is not None
            send.wait()
        return pickle.loads(received.numpy().tobytes())

    def recompute(self, batch: Any, chunk: int, step: int) -> Tensor:
        """Return the hashes of a chunk's gradient; gradients, sums and buffers are as before the step."""
        strategy, enter, count = self._strategy, self._ranks.heartbeat.enter, self._count(batch)
        model = strategy.unwrap(self._model)

        def on_loss(loss: Tensor, parts: Mapping[str, Any] | None) -> Tensor:
            enter("backward")
            return divided(loss, self._num_labels, count)

        enter("forward")
        model.zero_grad()
        strategy.order.discard()
        self._checks.observed = 0
        seed_micro_batch(self._seed, step, chunk, strategy.devices)
        # DDP's wrapper would expect to average these gradients.
        forward_backward(strategy, self._task, model, self._to_device(batch), on_loss, count, is_last=False)
        hashes = self._checks.hashes
        model.zero_grad()
        strategy.order.discard()
        return hashes

    def check(self, step: int) -> None:
        changed = (
            self._shards.num_changed() if self._shards is not None else torch.zeros(1, dtype=torch.int64)
        )
        balance = self._checks.balance()
        *balances, num_changed = sum_over_ranks(torch.cat([balance, changed.to(balance.device)])).tolist()
        if num_changed:
            self._refuse_changed_shards(step)
        if any(balances):
            self._refuse_wrong_sums(step, balances)
        if self._recomputed is None:
            return
        own = self._checks.hashes
        pair = torch.stack([bit_hash(own), bit_hash(self._recomputed)])
        pairs = pair.new_empty(2 * self._ranks.world_size)
        all_gather_single(pairs, pair)
        owners, verifiers = pairs.view(-1, 2).T.tolist()
        for verifier, value in enumerate(verifiers):
            owner, rank = self._partner(verifier), self._ranks.rank
            if value != owners[owner]:
                sent = [self._sent]  # not the batch itself, which the task's loss may have changed
                dist.broadcast_object_list(sent, owner, self._group)
                computed = [own] * (rank == owner) + [self._recomputed] * (rank == verifier)
                self._refuse_wrong_gradient(step, self._chunk_of(owner), pickle.loads(sent[0]), computed)
        self.verified_step = step

    def compare(self, batch: Any, chunk: int, step: int) -> None:
        """Compute the same chunk on all ranks, and compare (a collective).

        Args:
            batch: the same on every rank.

        Raises:
            WrongResultError: on every rank, if a rank computed wrong numbers.
        """
        self._num_labels = self._count(batch)
        own = self.recompute(batch, chunk, step)
        hashes = own.new_empty(self._ranks.world_size)
        all_gather_single(hashes, bit_hash(own).view(1))
        if len(set(hashes.tolist())) > 1:
            self._refuse_wrong_gradient(step, chunk, batch, [own])

    def after_update(self) -> None:
        if self._shards is not None:
            self._shards.note()

    def weights_may_change(self) -> AbstractContextManager:
        return self._shards.may_change() if self._shards is not None else nullcontext()

    # ---- errors, raised on every rank

    def _refuse_wrong_gradient(self, step: int, chunk: int, batch: Any, computed: Sequence[Tensor]) -> None:
        """Recompute a disputed chunk on all ranks, and name the rank outside the majority.

        Args:
            computed: the hashes of this rank's earlier computations of the chunk, if any.
        """
        again = self.recompute(batch, chunk, step)
        gathered = gather_objects([tuple(each.tolist()) for each in (*computed, again)])
        votes = [(rank, hashes) for rank, each in enumerate(gathered) for hashes in each]
        wrong, agreeing, first = vote(votes)
        name, total = self._names[first], f"{len(votes)} computations of this chunk"
        if wrong:
            why = (
                f"{self._named(wrong)} computed a wrong gradient for chunk {chunk} in step {step}, first in "
                f"{name}: {agreeing} of {total} agree"
            )
        else:
            wrong = [rank for rank, each in enumerate(gathered) if len(each) > 1]
            why = (
                f"{self._named(wrong)} disagree about the gradient of chunk {chunk} in step {step}, first in "
                f"{name}; without a majority among {total}, it is unknown which rank is wrong"
            )
        raise self._error(step, why, wrong, chunk=chunk, parameter=name)

    def _refuse_wrong_sums(self, step: int, balances: Sequence[int]) -> None:
        wrong = [rank for rank, balance in enumerate(balances) if balance]
        if len(wrong) < len(balances):
            why = f"{self._named(wrong)} received a wrong sum of the gradients of step {step}"
            if self._strategy.gradients_differ:  # no other rank receives this sum
                why += (
                    "; the cause may be this rank or any rank that sent a part of it: to find it, run python "
                    "-m trainer.exact.verify on these hosts"
                )
                wrong = []
        else:
            why = (
                f"all ranks received a wrong sum of the gradients of step {step}, so a message was corrupted "
                "or a rank made an error before the sum was complete"
            )
            wrong = []
        raise self._error(step, why, wrong)

    def _refuse_changed_shards(self, step: int) -> None:
        assert self._shards is not None
        changed = [
            [self._names[number] for number in each] for each in gather_objects(self._shards.changed())
        ]
        wrong = [rank for rank, names in enumerate(changed) if names]
        named = " and ".join(f"{self._ranks.describe(r)}, in {first_few(changed[r], 1)}" for r in wrong)
        why = f"the weights in memory changed between the updates of steps {step - 1} and {step} on {named}"
        raise self._error(step, why, wrong, parameter=changed[wrong[0]][0])

    def _named(self, ranks: Sequence[int]) -> str:
        return " and ".join(map(self._ranks.describe, ranks))

    def _error(self, step: int, why: str, ranks: Sequence[int], **facts: Any) -> WrongResultError:
        """Return the error, with what failure.json contains about the suspected devices (a collective)."""
        assert self.verified_step is not None
        devices = gather_objects(_device(self._ranks))
        suspects = [devices[rank] for rank in ranks]
        self._set_aside(self.verified_step, why)
        hosts = dict.fromkeys(each["host"] for each in suspects)
        suspect = {
            **(suspects[0] if len(suspects) == 1 else dict.fromkeys(devices[0])),
            **({"candidates": suspects} if len(suspects) > 1 else {}),
            **{"step": step, "chunk": None, "parameter": None, **facts},
            "verified_step": self.verified_step,
            "exclude": _exclude(list(hosts)) if hosts else {},
        }
        where = [f"rank {each['rank']} is on {each['host']}" for each in suspects]
        where = [
            f"{text}, GPU {each['gpu']} ({each['gpu_uuid']})" if each["gpu"] is not None else text
            for text, each in zip(where, suspects, strict=True)
        ]
        message = ". ".join([why, *(["; ".join(where)] if where else [])])
        named = tuple(ranks) if len(ranks) == 1 else ()
        return WrongResultError(f"{message}. {self.way_out}", named, {"suspect": suspect})

    @property
    def way_out(self) -> str:
        """The end of the message: what to do."""
        return (
            "No rank applied the update. To continue, start again with the same run_dir and resume=auto: the "
            f"run resumes from the newest checkpoint that is not later than step {self.verified_step}, the "
            "last verified step; failure.json contains the options that exclude the host"
        )


class ShardCheck:
    """Detects changes to this rank's shards outside an update; no other rank has a copy to compare."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._sums: Tensor | None = None
        self._changed = torch.zeros(len(self._parameters), dtype=torch.bool)

    def note(self) -> None:
        """Record the bits of the shards, reading each shard once and without waiting for the device."""
        self._sums = self._bits()

    def _bits(self) -> Tensor:
        return torch.stack([bit_sum(to_local(parameter.detach())) for parameter in self._parameters])

    def _compare(self) -> None:
        if self._sums is not None:
            changed = self._bits() != self._sums
            self._changed = changed | self._changed.to(changed.device)

    def num_changed(self) -> Tensor:
        """Return the number of parameters that have changed since `note`, as a tensor of shape (1,)."""
        self._compare()
        return self._changed.sum().view(1)

    def changed(self) -> list[int]:
        """Return the indices of the parameters that have changed."""
        return [number for number, has_changed in enumerate(self._changed.tolist()) if has_changed]

    @contextmanager
    def may_change(self) -> Iterator[None]:
        """Return a context manager for user code that may change the weights."""
        self._compare()
        yield
        self.note()


def offsets(hosts: Sequence[int]) -> list[int]:
    """Return the rank offsets between partners for which most partners are on different hosts."""
    crossing = {
        offset: sum(host != hosts[(rank + offset) % len(hosts)] for rank, host in enumerate(hosts))
        for offset in range(1, len(hosts))
    }
    return [offset for offset, number in crossing.items() if number == max(crossing.values())]


def vote(computed: Sequence[tuple[int, Hashes]]) -> tuple[list[int], int, int]:
    """Return the ranks outside the majority, the majority's size, and the first differing parameter.

    Without a majority, no ranks are returned.

    Args:
        computed: the rank and the hashes of each computation of one chunk, which do not all agree.
    """
    (expected, votes), *_ = Counter(hashes for _, hashes in computed).most_common()
    others = [(rank, hashes) for rank, hashes in computed if hashes != expected]
    differing = (
        number
        for _, hashes in others
        for number, (one, other) in enumerate(zip(hashes, expected, strict=True))
        if one != other
    )
    wrong = sorted({rank for rank, _ in others}) if 2 * votes > len(computed) else []
    return wrong, votes, min(differing)


def _exclude(hosts: Sequence[str]) -> dict[str, str]:
    """Return how to exclude hosts from the next job, for each scheduler."""
    nodes = " ".join(f"$(kubectl get pod {host} -o jsonpath={{.spec.nodeName}})" for host in hosts)
    return {"slurm": f"--exclude={','.join(hosts)}", "kubernetes": f"kubectl cordon {nodes}"}


def _device(ranks: Ranks) -> dict[str, Any]:
    return {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "gpu": ranks.device.index if accelerator.is_accelerator(ranks.device) else None,
        "gpu_uuid": accelerator.uuid(ranks.device),
    }
