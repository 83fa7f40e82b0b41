"""Observe a step: its samples with the loss of each, and the norms of each parameter."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.accelerator import for_sums
from trainer.context import Run
from trainer.data.loading.reader import sample_name
from trainer.distributed.agreement import gather_objects
from trainer.dry_run.step import state_restored
from trainer.errors import class_and_line
from trainer.report.weight_statistics import WeightStatistics
from trainer.task_hooks import begin_step_of_task
from trainer.tasks.label_counts import loss_of
from trainer.tensors.bits import as_bytes
from trainer.tensors.generators import generators_kept, seed_micro_batch
from trainer.tensors.local_shard import to_local
from trainer.tensors.nested import leaves, mapped

_SHOWN_TOKENS = 48
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Sample(NamedTuple):
    """A sample of a step, with its loss."""

    sample: int  # its index in the dataset; for a stream, its number in the epoch
    name: str
    epoch: int
    rank: int
    hash: str
    shown: str  # its label, or the beginning of its text
    loss: float | None  # of this sample alone; None if it can't be computed


def samples_of(run: Run, micro_batches: Sequence[Any], step: int) -> tuple[list[Sample], str]:
    """Return the samples of all ranks in the next step, highest loss first (a collective).

    Losses are computed without gradients, one sample at a time, with the seeds of the step. Batch norm
    uses its running statistics, because a single sample has no batch statistics.

    Returns:
        The samples, and the reason if they have no losses, otherwise an empty string.
    """
    progress, loader = run.state.progress, run.data.train_loader
    requests = loader.requests(progress.epoch, progress.samples_in_epoch)
    parts = [
        (index, part)
        for batch, request in zip(micro_batches, requests, strict=True)
        for index, part in zip(request.numbers, _split(batch, len(request.numbers)), strict=True)
    ]
    losses, reason = _losses(run, [part for _, part in parts], step)
    epoch, rank = progress.epoch, run.ranks.rank
    own = [
        Sample(index, sample_name(loader.dataset, index), epoch, rank, *_described(part), loss)
        for (index, part), loss in zip(parts, losses, strict=True)
    ]
    everything = [sample for of_rank in gather_objects(own) for sample in of_rank]
    return sorted(everything, key=_by_loss, reverse=True), reason


def _by_loss(sample: Sample) -> float:
    """Return the sort key of a sample: NaN comes before any number."""
    if sample.loss is None:
        return -math.inf
    return sample.loss if math.isfinite(sample.loss) else math.inf


def _split(batch: Any, size: int) -> list[Any]:
    """Return a batch of one for each sample; [None, ...] if the batch does not have a row for each sample."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors or any(len(tensor) != size for tensor in tensors):
        return [None] * size

    def row(number: int, leaf: Any) -> Any:
        return leaf[number : number + 1] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return [mapped(batch, partial(row, number)) for number in range(size)]


def _losses(run: Run, samples: Sequence[Any], step: int) -> tuple[list[float | None], str]:
    """Return the loss of each sample of this rank, and why there is none, if so (a collective)."""
    none: list[float | None] = [None] * len(samples)
    others = [each for of_rank in gather_objects(samples[:1]) for each in of_rank]
    if not others or any(each is None for each in others):
        return none, "the batch does not have a row for each sample"
    model, losses = run.state.model, list[float | None]()
    rounds = max(gather_objects(len(samples)))  # under fsdp, a forward pass needs all ranks
    batch_norms = [each for each in model.modules() if isinstance(each, _BATCH_NORMS)]
    modes = [each.training for each in batch_norms]
    with generators_kept(), state_restored(model), torch.no_grad(), run.strategy.evaluating(run.model):
        begin_step_of_task(run, step)
        for norm in batch_norms:
            norm.training = False
        try:
            for sample in [*samples, *others[:1] * (rounds - len(samples))]:
                seed_micro_batch(run.seed, step, run.data.first_micro_batch, run.strategy.devices)
                with run.strategy.autocast():
                    losses.append(loss_of(run.task, model, run.data.to_device(sample))[0].item())
        except Exception as error:  # a user's loss may need several samples
            return none, class_and_line(error)
        finally:
            for norm, mode in zip(batch_norms, modes, strict=True):
                norm.training = mode
    return losses[: len(samples)], ""


def _described(sample: Any) -> tuple[str, str]:
    """Return the hash of a sample, given as a batch of one, and its label or text."""
    if sample is None:
        return "", ""
    digest, shown = hashlib.blake2b(digest_size=8), ""
    for leaf in leaves(sample):
        digest.update(as_bytes(leaf.cpu()) if isinstance(leaf, Tensor) else repr(leaf).encode())
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64:
            tokens = leaf.flatten()[:_SHOWN_TOKENS].tolist()
            is_text = len(tokens) > 1 and all(0 <= token < 256 for token in tokens)
            words = bytes(tokens).decode(errors="replace") if is_text else " ".join(map(str, tokens))
            shown = shown or words
        elif isinstance(leaf, str):
            shown = shown or leaf
    return digest.hexdigest(), shown


class ParameterNorms(WeightStatistics):
    """The norms of the gradient, weight and update of each parameter, in the last steps of a replay.

    They are measured around the update, because gradients exist only until then.
    """

    def __init__(self, run: Run, first_step: int) -> None:
        super().__init__(run.state.model, run.ranks, histograms_every=None)
        self._run, self._first_step = run, first_step
        self.of_step: dict[int, dict[str, dict[str, float]]] = {}

    @contextmanager
    def around_update(self, step: int, examines: bool) -> Iterator[None]:
        """Measure the update within the context, from `first_step` on (a collective)."""
        if step < self._first_step:
            yield
            return
        own = self._run.state.trainable.own
        before = {name: parameter.detach().clone() for name, parameter in own.items()}
        values = self.of_step[step] = {
            "gradient": self._norms({name: parameter.grad for name, parameter in own.items()}),
            "weight": self._norms(before),
        }
        yield
        values["update"] = self._norms({name: p.detach() - before[name] for name, p in own.items()})

    def _norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        def values_of(tensor: Tensor) -> Tensor:
            return to_local(tensor).detach().to(for_sums(tensor.device))

        squares = [
            torch.zeros((), dtype=torch.float64)
            if tensor is None
            else torch.linalg.vector_norm(values_of(tensor), dtype=torch.float64).cpu() ** 2
            for tensor in tensors.values()
        ]
        total = torch.stack(squares).to(for_sums(self._run.ranks.device))
        if (group := self._run.state.trainable.group) is not None:
            dist.all_reduce(total, group=group)
        return dict(zip(tensors, total.sqrt().tolist(), strict=True))
