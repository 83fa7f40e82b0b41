"""Whether every host can connect to every other host, checked before gloo connects all ranks.

If gloo can't connect two ranks, its error names neither of their hosts, and any rank that waits looks like
the cause. Here the first rank of each host listens at gloo's address, every host connects to every other
host, and the results are exchanged in the store.
"""

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch.distributed as dist

from trainer.distributed.collectives import backstop
from trainer.distributed.interfaces import gloo_listener
from trainer.distributed.rendezvous import gather_in_store
from trainer.errors import Fault, few_lines

log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
# Each connection is answered with 8 KiB: if the hosts disagree about the MTU, only small packets arrive.
_REPEATS = 512
_MOST_S = 5.0  # for a connection: two lost packets are sent again within it
_MOST_THREADS = 128


class _Endpoint(NamedTuple):
    """Where a host listens, and the token by which it proves that it is that host."""

    address: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def answer(self) -> bytes:
        return self.token.encode() * _REPEATS


def check_links(
    store: dist.Store,
    rank: int,
    hosts: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
    both_ways: bool,
) -> None:
    """Raise if a host can't connect to another host (a collective of all ranks, in `store`).

    gloo connects two hosts from the one with the higher address. A failure of only the other direction is an
    error if `both_ways`, and otherwise a warning.

    Args:
        hosts: index of the host of every rank.
        names: host name of every rank.

    Raises:
        Fault: on all ranks, with one line for each ordered pair of hosts.
    """
    if len(set(hosts)) == 1:
        return
    first = hosts.index(hosts[rank])  # speaks for this host
    limit_s = min(timeout_s / 4, _MOST_S)  # it holds twice, and before the watch calls it a hang
    with _answering(gloo_listener() if rank == first else None, limit_s) as own:
        gathered = gather_in_store(store, "listening", rank, len(hosts), own, backstop(timeout_s))
        endpoints = {peer: _Endpoint(*each) for peer, each in enumerate(gathered) if each is not None}
        failures = _failures(endpoints, rank, limit_s) if rank == first else []
        gathered = gather_in_store(store, "unreachable", rank, len(hosts), failures, backstop(timeout_s))
    lines, is_fatal = [], False
    for source, failures in enumerate(gathered):
        for target, reason in failures:
            lines.append(
                f"host {hosts[source]} ({names[source]}) cannot reach host {hosts[target]} "
                f"({names[target]}, {endpoints[target]}): {reason}"
            )
            is_fatal |= both_ways or (source in endpoints and _connects(endpoints[source], endpoints[target]))
    if is_fatal:
        lines = few_lines(lines)
        raise Fault(
            "\n".join(lines)
            + "\nopen all TCP ports between the hosts; if an address is not the one by which "
            "the hosts reach each other, set GLOO_SOCKET_IFNAME to its interface"
        )
    if rank == 0:
        for line in few_lines(lines):
            log.warning("%s", line)


@contextlib.contextmanager
def _answering(listener: socket.socket | None, limit_s: float) -> Iterator[_Endpoint | None]:
    """Answer every connection to `listener`, and yield its endpoint."""
    if listener is None:
        yield None
        return
    address, port, *_ = listener.getsockname()
    own = _Endpoint(address, port, secrets.token_hex(_TOKEN_BYTES // 2))

    def answer() -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(limit_s)
                    connection.sendall(own.answer)

    thread = threading.Thread(target=answer, name="links", daemon=True)
    thread.start()
    with listener:
        try:
            yield own
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            thread.join()


def _failures(endpoints: Mapping[int, _Endpoint], rank: int, limit_s: float) -> list[tuple[int, str]]:
    """The endpoints to which this host can't connect, each with the reason."""
    # Each host begins with the next one, so that not all of them connect to the same host at once.
    others = sorted(endpoints.keys() - {rank}, key=lambda other: (other < rank, other))
    with ThreadPoolExecutor(_MOST_THREADS, "links") as pool:
        reasons = pool.map(lambda other: _failure(endpoints[other], limit_s), others)
        return [(other, reason) for other, reason in zip(others, reasons, strict=True) if reason]


def _failure(endpoint: _Endpoint, limit_s: float) -> str:
    """Why `endpoint` can't be reached; "" if it can."""
    reason = f"no answer for {limit_s:g} s"
    try:
        with socket.create_connection(endpoint[:2], limit_s) as connection:
            reason = f"it connects, but no data arrives for {limit_s:g} s; do the hosts have the same MTU?"
            answer = connection.makefile("rb").read(len(endpoint.answer))
    except TimeoutError:
        return reason
    except OSError as error:
        return str(error.strerror or error).lower()
    return "" if answer == endpoint.answer else "another host or program answers there"


def _connects(source: _Endpoint, target: _Endpoint) -> bool:
    """Whether gloo opens the connection between two hosts from `source`; equal addresses can't work."""
    own, other = (ipaddress.ip_address(each.address.partition("%")[0]) for each in (source, target))
    return own.packed >= other.packed
