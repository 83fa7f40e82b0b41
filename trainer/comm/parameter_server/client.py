"""A worker's side of the exchange: pull values into its parameters, push its gradients, bucket by bucket."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.comm.parameter_server.layout import ShardedBucket, digest, unpack
from trainer.comm.parameter_server.links import ANSWER, COMMIT, HELLO, REQUEST, Link, Transfer, down, up
from trainer.local_shard import other_bits


class Client:
    """Pulls from all servers into the parameters of one replica.

    Args:
        links: to the servers, in their order.
        parameters: of the replica, by name, on any device.

    """

    def __init__(
        self, links: Sequence[Link], buckets: Sequence[ShardedBucket], parameters: Mapping[str, Tensor]
    ) -> None:
        self._links, self._buckets, self._parameters = links, buckets, parameters
        self._incoming = [_messages(bucket) for bucket in buckets]
        self._outgoing = [_messages(bucket) if bucket.trainable else [] for bucket in buckets]
        self._names = [name for bucket in buckets if bucket.trainable for name in bucket.names]
        self._awaited: dict[int, list[Transfer]] = {}
        self._pulls, self._waited_s = 0, 0.0
        self.settled_at = 0.0  # when the last values had come
        self.blocked_s = 0.0  # waiting for values, for gradients to be sent and for answers
        self._num_bytes = [0] * len(links)  # pulled from and pushed to each server
        self._told: dict[str, float] = dict.fromkeys(self.totals(), 0.0)  # at the last call of `metrics`

    def greet(self) -> None:
        """Tell every server this worker's layout; it refuses another."""
        word = torch.tensor([digest(self._buckets)])
        for transfer in [link.send(word, HELLO) for link in self._links]:
            transfer.wait()

    def totals(self) -> dict[str, float]:
        """Pulls, seconds waited for values, and bytes to and from each server."""
        moved = {f"bytes/{server}": float(count) for server, count in enumerate(self._num_bytes)}
        return {"pulls": float(self._pulls), "waited_s": self._waited_s, **moved}

    def metrics(self) -> dict[str, float]:
        """The totals since the last call."""
        totals, before = self.totals(), self._told
        self._told = totals
        return {name: value - before[name] for name, value in totals.items()}

    # ---- pull

    @property
    def awaits(self) -> bool:
        """Whether some requested values have not been waited for."""
        return bool(self._awaited)

    @torch.no_grad()
    def ask(self) -> None:
        """Begin to receive all trainable buckets; until they are settled, their parameters are NaN.

        A use that torch hides, and that does not wait for them, then gives a NaN loss, not a wrong one.
        """
        assert not self._awaited, "one pull at a time"
        self._pulls += 1
        for bucket in self._buckets:
            if bucket.trainable:
                self._awaited[bucket.index] = [
                    self._links[server].receive(message, down(bucket.index))
                    for server, message in enumerate(self._incoming[bucket.index])
                    if message.numel()
                ]
        for name in self._names:
            self._parameters[name].fill_(math.nan)

    def settle(self, index: int) -> None:
        """Wait for the bucket and copy it into its parameters, unless that is done already."""
        transfers = self._awaited.pop(index, None)
        if transfers is None:
            return
        began = time.perf_counter()
        for transfer in transfers:
            transfer.wait()
        self.settled_at = time.perf_counter()
        self._waited_s += self.settled_at - began
        self.blocked_s += self.settled_at - began
        for server, message in enumerate(self._incoming[index]):
            self._num_bytes[server] += message.nbytes
            unpack(self._buckets[index], server, message, self._parameters)

    def settle_all(self) -> None:
        for index in list(self._awaited):
            self.settle(index)

    def keep(self, index: int, server: int, message: Tensor) -> None:
        """Note values that the parameters got from a server without a pull."""
        self._incoming[index][server].copy_(message)

    def changed(self, index: int) -> list[str]:
        """The names of parameters in a bucket that no longer have the values pulled or kept."""
        names = []
        for server, message in enumerate(self._incoming[index]):
            for span in self._buckets[index].row_ranges[server]:
                rows = self._parameters[span.name].detach()[span.begin : span.end]
                if other_bits(rows.cpu().reshape(-1), message[span.at : span.at + span.numel]):
                    names.append(span.name)
        return names

    # ---- requests

    def request(self, kind: int) -> None:
        """Tell every server what comes next."""
        for transfer in [link.send(torch.tensor([kind, 0]), REQUEST) for link in self._links]:
            transfer.wait()

    def ask_first(self, kind: int, stops: bool = False) -> int:
        """Ask the first server, and wait for its answer; `stops`: this worker received a request to stop."""
        self._links[0].send(torch.tensor([kind, int(stops)]), REQUEST).wait()
        return self._answer(self._links[0])

    def answers(self) -> None:
        """Wait for an answer of every server."""
        began = time.perf_counter()
        for link in self._links:
            self._answer(link)
        self.blocked_s += time.perf_counter() - began

    def _answer(self, link: Link) -> int:
        word = torch.empty(1, dtype=torch.int64)
        link.receive(word, ANSWER).wait()
        return int(word)

    # ---- push

    def push(self, index: int) -> None:
        """Send the gradients of a bucket; zeros for a parameter that has none."""
        bucket, transfers = self._buckets[index], []
        for server, message in enumerate(self._outgoing[index]):
            for span in bucket.row_ranges[server]:
                gradient = self._parameters[span.name].grad
                part = message[span.at : span.at + span.numel]
                if gradient is None:
                    part.zero_()
                elif span.numel:
                    rows = gradient[span.begin : span.end]
                    part.view(rows.shape).copy_(rows)
            if message.numel():
                transfers.append(self._links[server].send(message, up(index)))
                self._num_bytes[server] += message.nbytes
        for transfer in transfers:
            transfer.wait()

    def pushed_nan(self) -> bool:
        """Whether a message begins with NaN, as all do after a loss of NaN."""
        return any(bool(message[:1].isnan().any()) for messages in self._outgoing for message in messages)

    def commit(self, *facts: float) -> None:
        """End a push: send `facts` about it, and which parameters had a gradient at all."""
        there = [float(self._parameters[name].grad is not None) for name in self._names]
        word = torch.tensor([*facts, *there], dtype=torch.float64)
        for transfer in [link.send(word, COMMIT) for link in self._links]:
            transfer.wait()


def _messages(bucket: ShardedBucket) -> list[Tensor]:
    return [torch.empty(numel, dtype=bucket.dtype) for numel in bucket.numels]
