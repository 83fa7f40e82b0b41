"""A server's side of the exchange: threads that give values and take gradients."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.comm.exchange.layout import Bucket, digest
from trainer.comm.exchange.links import COMMIT, HELLO, Link, Transfer, down, up
from trainer.comm.schedules.exchange import in_turn


class LayoutError(RuntimeError):
    """A worker would cut or send the parameters otherwise."""


class Server:
    """The `index`-th server's shard: one flat tensor of values for each bucket.

    Args:
        links: to the workers, by rank, in the order in which their gradients are added up.
        values: by bucket, to be sent.
        pack: brings them up to date with the shard's parameters.
    """

    def __init__(
        self,
        index: int,
        links: Mapping[int, Link],
        buckets: Sequence[Bucket],
        values: Sequence[Tensor],
        pack: Callable[[], None] = lambda: None,
    ) -> None:
        self.index, self.links, self._values, self._pack = index, links, values, pack
        self._digest = digest(buckets)
        self.buckets = [bucket for bucket in buckets if bucket.trainable and bucket.numels[index]]
        # A whole push of each worker: its buckets come in an order of their own.
        self.pushed = {
            worker: {b.index: torch.empty(b.numels[index], dtype=b.dtype) for b in self.buckets}
            for worker in links
        }
        self.num_trained = sum(len(bucket.names) for bucket in buckets if bucket.trainable)
        workers = list(links)
        self._in_turn = [workers[place] for place in in_turn(index, len(workers))]
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None

    def welcome(self, worker: int) -> None:
        """Hear from a worker by which layout it goes.

        Raises:
            LayoutError: it is another than this server's.
        """
        word = torch.zeros(1, dtype=torch.int64)
        self.links[worker].receive(word, HELLO).wait()
        if int(word) != self._digest:
            raise LayoutError(f"rank {worker} would send other parameters, or cut them otherwise")

    def begin(self, *tasks: Callable[[], None]) -> None:
        """Do each in a thread of its own."""

        def guarded(task: Callable[[], None]) -> None:
            try:
                with torch.no_grad():
                    task()
            except Exception as error:  # to be raised by `finish`; the first says most
                self._error = self._error or error

        # Daemons: a thread that waits for a peer must not keep a failing process alive.
        self._threads = [
            threading.Thread(target=guarded, args=(task,), name="serves", daemon=True) for task in tasks
        ]
        for thread in self._threads:
            thread.start()

    def begin_each(self, serve: Callable[[int], None]) -> None:
        """Call `serve` with each worker, in a thread of its own."""
        self.begin(*(partial(serve, worker) for worker in self.links))

    def finish(self) -> None:
        """Wait until all have been served. Raises what went wrong in serving one."""
        for thread in self._threads:
            thread.join()  # each of its waits has a deadline
        if self._error is not None:
            raise self._error

    def copy(self) -> dict[int, Tensor]:
        """The values as they are now, by bucket."""
        self._pack()
        return {bucket.index: self._values[bucket.index].clone() for bucket in self.buckets}

    def give(self, workers: Sequence[int], values: Mapping[int, Tensor] | None = None) -> list[Transfer]:
        """Begin to send all buckets that are trained: `values`, or those that there are.

        Nobody may change them before each transfer has been waited for.
        """
        values = values if values is not None else dict(enumerate(self._values))
        return [
            self.links[worker].send(values[bucket.index], down(bucket.index))
            for bucket in self.buckets
            for worker in workers
        ]

    def take(
        self, workers: Sequence[int], num_facts: int, arrived: Callable[[int], None] = lambda index: None
    ) -> list[Tensor]:
        """Receive a push of each into `pushed`, telling `arrived` of a bucket that has come from all.

        Returns:
            What each worker said when it was done: facts, then 1 or 0 for each trained parameter.
        """
        transfers = {
            bucket.index: [
                self.links[worker].receive(self.pushed[worker][bucket.index], up(bucket.index))
                for worker in workers
            ]
            for bucket in self.buckets
        }
        for index in reversed(transfers):  # a backward pass ends with the first layers
            for transfer in transfers[index]:
                transfer.wait()
            arrived(index)
        words = [torch.empty(num_facts + self.num_trained, dtype=torch.float64) for _ in workers]
        for worker, word in zip(workers, words, strict=True):
            self.links[worker].receive(word, COMMIT).wait()
        return words

    def give_all(self) -> list[Transfer]:
        return self.give(self._in_turn)

    def take_mean(self) -> tuple[dict[int, Tensor], Tensor]:
        """The mean of all workers' gradients by bucket, and which parameters any had one of.

        Each bucket is added up when all are there, in workers' order.
        """
        words = self.take(list(self.links), 0, self._add_up)
        return next(iter(self.pushed.values())), torch.stack(words).bool().any(0)

    def _add_up(self, index: int) -> None:
        total, *others = (pushed[index] for pushed in self.pushed.values())
        if total.dtype in (torch.float16, torch.bfloat16):
            wide = torch.stack([part.float() for part in (total, *others)])
            total.copy_(wide.sum(0).div_(len(wide)))
            return
        for part in others:
            total.add_(part)
        total.div_(1 + len(others))
