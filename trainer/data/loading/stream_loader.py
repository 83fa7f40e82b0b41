"""Loaders of streams: the same slices of the same global batches, from data that is only read forward."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.data.loading.base import Batches, LoaderSettings, Share, batches_of, raise_errors
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.sampler import EvalRequests, TrainRequests
from trainer.data.loading.stream_reader import CaughtUp, EvalStreamReader, StreamPosition, TrainStreamReader
from trainer.errors import UserError
from trainer.faults.heartbeat import Heartbeat

log = logging.getLogger(__name__)

Shards = dict[int, tuple[int, Any]]  # as in StreamPosition


class StreamTrainLoader:
    """A TrainLoader of data read forward."""

    def __init__(self, dataset: Any, settings: LoaderSettings, batch: BatchSplit, share: Share) -> None:
        self._reader = TrainStreamReader(
            dataset, share.seed, settings.sharded, share.heartbeat, share.collate
        )
        self._requests = TrainRequests(batch, share.replica, self._reader.num_shards)
        self._loader = batches_of(self._reader, self._requests, settings, share)
        self._batch, self._replica, self._num_workers = batch, share.replica, max(1, settings.num_workers)
        self._batches: _StepAhead | None = None
        self.num_samples = self._reader.num_samples
        total, size = self.num_samples, batch.global_batch_size
        self.steps_per_epoch = None if total is None else total // size
        self.num_skipped = 0

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """Samples between the position given to `resume` and ``first_sample`` are read and dropped."""
        requests, begin = self._requests, self._reader.begin
        requests.epoch, requests.first_sample, requests.reading = epoch, first_sample, requests.reading + 1
        requests.caught_up = first_sample == 0
        knows_position = self._reader.keeps_state and bool(begin.shards) and begin.epoch == epoch
        if first_sample and not knows_position and self._replica == 0:
            log.warning(
                "%s cannot save its position (state_dict): the first %s samples of the epoch are read and "
                "dropped",
                type(self._reader.stream).__name__,
                f"{first_sample:,}",
            )
        position = begin if knows_position else StreamPosition(self._reader.num_shards, epoch)
        # Nothing here refers to this object: in a reference cycle, the DataLoader would be left to the
        # garbage collector, and wait 5 s for each of its workers.
        batches = _caught_up(self._loader, requests, self._num_workers, self._reader.heartbeat)
        self._batches = _StepAhead(batches, self._batch.accumulation, position)
        return self._batches

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        return None

    def order_hash(self) -> str | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        assert self._batches is not None, "no epoch has begun"
        return self._batches.position.state_dict()

    def resume(self, states: list[dict[str, Any]]) -> None:
        known = [state for state in states if state]  # a save at a fault has one rank's alone
        if not known:
            return  # saved between two epochs
        position = StreamPosition.merged(known)
        if position.num_shards != self._reader.num_shards:
            raise UserError(
                f"the training stream was read as {position.num_shards} shards when the checkpoint was "
                f"saved, and is now read as {self._reader.num_shards}, which changes the order of its "
                "samples; use the former number (data.sharded), or start a new run from these weights "
                "with model.init_from"
            )
        self._reader.begin = position


class StreamEvalLoader:
    """An EvalLoader of data read forward; every rank reads all of it."""

    def __init__(self, dataset: Any, settings: LoaderSettings, batch: BatchSplit, share: Share) -> None:
        self._reader = EvalStreamReader(dataset, share.seed, heartbeat=share.heartbeat, collate=share.collate)
        self._loader = batches_of(self._reader, EvalRequests(batch, share.replica), settings, share)
        self.num_samples, self.batch_size = self._reader.num_samples, batch.micro_batch_size
        self.num_skipped = 0

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        is_empty = True
        for answer in raise_errors(self._loader):
            if answer is None:
                break
            is_empty = False
            yield answer
        if is_empty:
            raise UserError("the evaluation data is empty; set train.eval_every_epochs=0 to train without it")


def _caught_up(
    answers: Iterable[Any], requests: TrainRequests, num_workers: int, heartbeat: Heartbeat
) -> Iterator[tuple[Any, Shards]]:
    """The batches, once every worker has reached the first sample."""
    there, said = 0, time.monotonic()
    for answer in raise_errors(answers):
        if answer is None:
            return
        if not isinstance(answer, CaughtUp):
            yield answer
            continue
        heartbeat.progress()
        there = there + 1 if answer.there else 0  # workers answer in round-robin order
        requests.caught_up = there >= num_workers
        if requests.replica == 0 and time.monotonic() > said + 10:
            log.info(
                "read %s of %s samples to be dropped", f"{answer.number:,}", f"{requests.first_sample:,}"
            )
            said = time.monotonic()


class _StepAhead(Batches):
    """Micro-batches of unknown number: those of the next step are fetched with the last one of this step.

    Attributes:
        position: that of the stream after the micro-batches returned so far.
    """

    def __init__(
        self, batches: Iterator[tuple[Any, Shards]], accumulation: int, position: StreamPosition
    ) -> None:
        self._batches, self._accumulation, self.position = batches, accumulation, position
        self._now: deque[tuple[Any, Shards]] = deque()
        self._fetch()

    def _fetch(self) -> None:
        self._ahead = deque(itertools.islice(self._batches, self._accumulation))
        self.data_left = len(self._ahead) == self._accumulation

    def ahead(self) -> list[Any]:
        return [batch for batch, _ in self._ahead]

    def __next__(self) -> Any:
        if not self._now:
            if not self.data_left:
                raise StopIteration
            self._now = self._ahead
        if len(self._now) == 1:
            self._fetch()
        batch, shards = self._now.popleft()
        self.position = self.position.moved_on(shards)
        return batch
