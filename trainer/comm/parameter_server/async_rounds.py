"""Asynchronous rounds: each worker asks for shares of steps, pulls and pushes; each push is an update.

A round is several steps of as many shares as there are workers. A worker that asks gets the next share, so a
slow worker computes fewer, and each share is computed once. Source: Ho et al., "More effective distributed ML
via a stale synchronous parallel parameter server", NIPS 2013, for the bound on how far a worker may be ahead.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.links import ANSWER, REQUEST, Link
from trainer.comm.parameter_server.order import Order
from trainer.comm.parameter_server.server import Server
from trainer.errors import UserError

_NEXT_SHARE, _MAY_PULL, _PULL, _PUSH, _END = range(5)
_FACTS = 1  # of a push: the factor for its gradients; NaN: they must not be applied

Apply = Callable[[dict[int, Tensor], Tensor], None]
"""Apply gradients by bucket, given which parameters have one. Raises UserError where that cannot be."""


class AsyncServer:
    """One server's role in rounds; the first server assigns the shares.

    Args:
        max_staleness: pushes that a worker may be ahead of the slowest when it pulls; math.inf: unlimited.

    Attributes:
        staleness: pushes by the number of updates that their values lacked.
        not_finite: the worker whose push must not be applied; no share is assigned after it.
        refused: why the optimizer cannot apply pushes; no share is assigned after it.
    """

    def __init__(self, server: Server, order: Order, max_staleness: float, apply: Apply) -> None:
        self.order, self.staleness = order, Counter[int]()
        self.not_finite: int | None = None
        self.refused: str | None = None
        self._server, self._max_staleness, self._apply = server, max_staleness, apply
        self._num_updates, self._pulled_at = 0, dict.fromkeys(server.links, 0)

    def start(self, steps: int, replayed: Sequence[str] | None, stops: Callable[[], bool]) -> None:
        """Serve a round of at most `steps` steps, in threads; a `replayed` round is repeated in full."""
        num_workers = len(self._server.links)
        self.order.start(replayed)
        self._handed_out, self._limit, self._stops = 0, steps * num_workers, stops
        self._is_replayed = replayed is not None
        if replayed is not None:
            pushes = sum(event.startswith("push") for event in replayed)
            self._limit = min(self._limit, pushes)
        self._clocks: dict[int, float] = dict.fromkeys(self._server.links, 0.0)
        self._server.start(self._serve)

    def finish(self) -> int:
        """Wait for the end of the round; return its number of steps, which the first server knows."""
        self._server.finish()
        return self._limit // len(self._server.links)

    @property
    def busy_s(self) -> float:
        """The time to copy values for a pull and to apply a push, the mean over the run."""
        return self.order.busy_s / max(1, self._num_updates)

    def _serve(self, worker: int) -> None:
        link = self._server.links[worker]
        request = torch.empty(2, dtype=torch.int64)
        while True:
            link.receive(request, REQUEST).wait()
            kind, stops = request.tolist()
            if kind == _NEXT_SHARE:
                with self.order.turn("part", worker):
                    number = self._hand_out(bool(stops))
                _answer(link, number)
            elif kind == _MAY_PULL:
                self.order.wait_until(lambda: self._may_pull(worker), self._slowest)
                _answer(link, 0)
            elif kind == _PULL:
                with self.order.turn("pull", worker):
                    values = self._server.copy_for(worker)
                    self._pulled_at[worker] = self._num_updates
                self._server.send(worker, values)
            elif kind == _PUSH:
                word = self._server.receive(worker, _FACTS)
                with self.order.turn("push", worker):
                    self._update(worker, word)
                _answer(link, 0)
            else:
                with self.order.turn("end", worker):
                    self._clocks[worker] = math.inf  # no worker waits for it
                return

    def _hand_out(self, stops: bool) -> int:
        """The number of the next share; -1 if there is none."""
        if (stops or self._stops()) and not self._is_replayed:
            self._stop()
        if self._handed_out == self._limit:
            return -1
        self._handed_out += 1
        return self._handed_out - 1

    def _slowest(self) -> int:
        return min(self._clocks, key=self._clocks.__getitem__)

    def _may_pull(self, worker: int) -> bool:
        return self._clocks[worker] - min(self._clocks.values()) <= self._max_staleness

    def _update(self, worker: int, word: Tensor) -> None:
        gradients = self._server.pushed[worker]
        factor, there = float(word[0]), word[_FACTS:].bool()
        if math.isnan(factor):  # the worker tells all servers, since each sees only its rows
            self.not_finite = worker
            self._stop()
        else:
            for gradient in gradients.values():
                gradient.mul_(factor)
            try:
                self._apply(gradients, there)
            except UserError as error:
                self.refused = str(error)
                self._stop()
        self.staleness[self._num_updates - self._pulled_at[worker]] += 1
        self._num_updates += 1
        self._clocks[worker] += 1

    def _stop(self) -> None:
        """Assign only as many further shares as complete the steps already begun."""
        num_workers = len(self._server.links)
        self._limit = min(self._limit, -(-self._handed_out // num_workers) * num_workers)


class AsyncWorker:
    """A worker's role in rounds: what to compute next, and when to pull.

    Attributes:
        share: what it computes now: a step of the round and a replica.

    Args:
        bounded: whether to wait for slower workers before each pull.
        stops: whether this worker has received a request to stop.
        waits: the context of a wait for slower workers.
    """

    def __init__(
        self,
        client: Client,
        num_workers: int,
        bounded: bool,
        stops: Callable[[], bool],
        waits: Callable[[], AbstractContextManager],
    ) -> None:
        self._client, self._num_workers, self._bounded = client, num_workers, bounded
        self._stops, self._waits = stops, waits
        self._ahead: list[tuple[int, int]] = []  # received, but not yet drawn by the sampler
        self._assigned: list[tuple[int, int]] = []  # received, but not yet begun
        self._drawn = self._begun = 0
        self._is_over = True

    def start(self) -> None:
        self._is_over = False

    def draw(self) -> tuple[int, int] | None:
        """The next share: a step of the round and a replica; None at the end of the round."""
        share = self._ahead.pop(0) if self._ahead else self._ask()
        self._drawn += share is not None
        return share

    def has_share(self) -> bool:
        """Whether there is another share to compute; at the end of the round, tell all servers."""
        if self._drawn <= self._begun:  # else a sampler that reads ahead has asked already
            share = self._ask()
            if share is None:
                self._client.request(_END)
                return False
            self._ahead.append(share)
        self._begun += 1
        self.share = self._assigned.pop(0)
        return True

    def _ask(self) -> tuple[int, int] | None:
        if self._is_over:
            return None
        number = self._client.ask_first(_NEXT_SHARE, self._stops())
        self._is_over = number < 0
        if self._is_over:
            return None
        self._assigned.append(divmod(number, self._num_workers))
        return self._assigned[-1]

    def before_pull(self) -> None:
        if self._bounded:
            with self._waits():
                self._client.ask_first(_MAY_PULL)
        self._client.request(_PULL)

    def before_push(self) -> None:
        self._client.request(_PUSH)

    def after_push(self, factor: float) -> None:
        """Wait until every server has updated; with a `factor` of NaN none does."""
        self._client.commit(factor)
        self._client.answers()


def _answer(link: Link, number: int) -> None:
    link.send(torch.tensor([number]), ANSWER).wait()
