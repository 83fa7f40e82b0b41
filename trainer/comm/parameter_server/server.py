"""A server's side of the exchange: a thread for each worker that sends values and receives gradients."""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.comm.parameter_server.layout import ShardedBucket, digest
from trainer.comm.parameter_server.links import COMMIT, HELLO, Link, down, up


class LayoutError(RuntimeError):
    """A worker would split or send the parameters differently."""


class Server:
    """The `index`-th server's shard: one flat tensor of values for each bucket.

    Args:
        links: to the workers, by rank, in the order in which their gradients are added.
        values: by bucket, to be sent.
        pack: copies the shard's parameters to `values`.
    """

    def __init__(
        self,
        index: int,
        links: Mapping[int, Link],
        buckets: Sequence[ShardedBucket],
        values: Sequence[Tensor],
        pack: Callable[[], None] = lambda: None,
    ) -> None:
        self.index, self.links, self._values, self._pack = index, links, values, pack
        self._digest = digest(buckets)
        self.buckets = [bucket for bucket in buckets if bucket.trainable and bucket.numels[index]]
        # A whole push of each worker, since buckets come in any order.
        self.pushed = {
            worker: {b.index: torch.empty(b.numels[index], dtype=b.dtype) for b in self.buckets}
            for worker in links
        }
        self.num_trained = sum(len(bucket.names) for bucket in buckets if bucket.trainable)
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None

    def welcome(self, worker: int) -> None:
        """Receive a worker's layout.

        Raises:
            LayoutError: it differs from this server's.
        """
        word = torch.zeros(1, dtype=torch.int64)
        self.links[worker].receive(word, HELLO).wait()
        if int(word) != self._digest:
            raise LayoutError(f"rank {worker} would send other parameters, or split them differently")

    def start(self, serve: Callable[[int], None]) -> None:
        """Call `serve` with each worker, each in its own thread."""

        def guarded(worker: int) -> None:
            try:
                with torch.no_grad():
                    serve(worker)
            except Exception as error:  # raised by `finish`; the first is the most informative
                self._error = self._error or error

        # Daemons: a thread that waits for a peer must not keep a failing process alive.
        self._threads = [
            threading.Thread(target=guarded, args=(worker,), name=f"serves rank {worker}", daemon=True)
            for worker in self.links
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all workers have been served. Raises the first error of a serving thread."""
        for thread in self._threads:
            thread.join()  # each of its waits has a deadline
        if self._error is not None:
            raise self._error

    def copy_for(self, worker: int) -> Mapping[int, Tensor]:
        """A copy of the values as they are now, by bucket, where the worker's last push was.

        That push has been applied, and the next comes only after this copy was sent: it needs no more memory.
        """
        self._pack()
        for index, copy in self.pushed[worker].items():
            copy.copy_(self._values[index])
        return self.pushed[worker]

    def send(self, worker: int, values: Mapping[int, Tensor] | None = None) -> None:
        """Send all trainable buckets: `values`, or the current ones, which must not change."""
        values = values if values is not None else dict(enumerate(self._values))
        for bucket in self.buckets:  # one at a time: all at once would crowd the links
            self.links[worker].send(values[bucket.index], down(bucket.index)).wait()

    def receive(self, worker: int, num_facts: int, arrived: Callable[[int], None] | None = None) -> Tensor:
        """Receive a push into `pushed[worker]`, and call `arrived` for each bucket.

        Returns:
            The worker's last message: facts, then 1 or 0 for each trainable parameter.
        """
        link, own = self.links[worker], self.pushed[worker]
        transfers = {index: link.receive(message, up(index)) for index, message in own.items()}
        for index in reversed(transfers):  # a backward pass ends with the first layers
            transfers[index].wait()
            if arrived is not None:
                arrived(index)
        word = torch.empty(num_facts + self.num_trained, dtype=torch.float64)
        link.receive(word, COMMIT).wait()
        return word


class Mean:
    """The mean of all workers' gradients, added in workers' order, each bucket when all have arrived."""

    def __init__(self, server: Server) -> None:
        self._pushed = list(server.pushed.values())
        self._lock = threading.Lock()
        self._counts = {bucket.index: 0 for bucket in server.buckets}
        self.gradients = dict(self._pushed[0])  # by bucket
        self.there = torch.zeros(server.num_trained, dtype=torch.bool)

    def arrived(self, index: int) -> None:
        """Called when one worker's part of a bucket has arrived; the thread of the last part adds up."""
        with self._lock:
            self._counts[index] += 1
            if self._counts[index] < len(self._pushed):
                return
            self._counts[index] = 0
        total = self._pushed[0][index]
        if total.dtype in (torch.float16, torch.bfloat16):
            wide = torch.stack([pushed[index].float() for pushed in self._pushed])
            total.copy_(wide.sum(0).div_(len(self._pushed)))
            return
        for pushed in self._pushed[1:]:
            total.add_(pushed[index])
        total.div_(len(self._pushed))

    def add(self, word: Tensor) -> None:
        """Record which parameters one worker had gradients of."""
        with self._lock:
            self.there |= word.bool()
