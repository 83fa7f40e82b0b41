"""Check that every host can connect to every other host, before gloo connects all ranks.

If gloo can't connect two ranks, its error names neither host, and every rank that waits for them looks like
the cause. Therefore, the first rank of each host listens at gloo's address and connects to every other host,
and the ranks exchange the results in the store.
"""

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from trainer.distributed.collectives import backstop
from trainer.distributed.interfaces import gloo_listener
from trainer.distributed.rendezvous import gather_in_store
from trainer.errors import RetryableError, few_lines

log = logging.getLogger(__name__)

# Address, port, and the token that proves the identity of the host that listens there.
Endpoint = tuple[str, int, str]

# Each connection is answered with 8 KiB: if the hosts disagree about the MTU, only small packets arrive.
_ANSWER_BYTES = 8192
_CONNECT_S = 5.0  # the limit for a connection: enough for TCP to resend two lost packets
_MAX_THREADS = 128


def check_links(
    store: dist.Store,
    rank: int,
    hosts: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
    both_ways: bool,
) -> None:
    """Raise RetryableError if a host can't connect to another host (a collective of all ranks, in `store`).

    gloo connects two hosts from the host with the higher address. If only the other direction fails, this
    raises an error if `both_ways` is true, and logs a warning otherwise.

    Raises:
        RetryableError: on all ranks, with one line for each direction that fails between two hosts.
    """
    if len(set(hosts)) == 1:
        return
    speaks = hosts.index(hosts[rank]) == rank  # the first rank of each host does the check
    limit_s = min(timeout_s / 4, _CONNECT_S)  # two such waits must end before the watch reports a hang
    listener = gloo_listener() if speaks else None
    with contextlib.nullcontext() if listener is None else _answering(listener, limit_s) as own:
        gathered = gather_in_store(store, "listening", rank, len(hosts), own, backstop(timeout_s))
        endpoints = {other: endpoint for other, endpoint in enumerate(gathered) if endpoint is not None}
        failures = _failures(endpoints, rank, limit_s) if speaks else []
        gathered = gather_in_store(store, "unreachable", rank, len(hosts), failures, backstop(timeout_s))
    lines, is_fatal = [], both_ways
    for source, failures in enumerate(gathered):
        for target, reason in failures:
            address, port, _ = endpoints[target]
            lines.append(
                f"host {hosts[source]} ({names[source]}) cannot reach host {hosts[target]} ({names[target]}, "
                f"{f'[{address}]' if ':' in address else address}:{port}): {reason}"
            )
            is_fatal |= source in endpoints and _packed(endpoints[source]) >= _packed(endpoints[target])
    if lines and is_fatal:
        advice = (
            "open all TCP ports between the hosts; if a host listens at the wrong address, set "
            "GLOO_SOCKET_IFNAME on that host to the network interface that the other hosts can reach"
        )
        raise RetryableError("\n".join([*few_lines(lines), advice]))
    for line in few_lines(lines) if rank == 0 else []:
        log.warning("%s", line)


@contextlib.contextmanager
def _answering(listener: socket.socket, limit_s: float) -> Iterator[Endpoint]:
    """Within the context, answer every connection to `listener` in a thread; yield the endpoint."""
    token = secrets.token_hex(8)

    def answer() -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(limit_s)
                    connection.sendall(_answer(token))

    thread = threading.Thread(target=answer, name="links", daemon=True)
    thread.start()
    with listener:
        try:
            address, port, *_ = listener.getsockname()
            yield address, port, token
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            thread.join()


def _answer(token: str) -> bytes:
    return token.encode().ljust(_ANSWER_BYTES)


def _failures(endpoints: Mapping[int, Endpoint], rank: int, limit_s: float) -> list[tuple[int, str]]:
    # Each host begins with the next one, so that not all of them connect to the same host at once.
    others = sorted(endpoints.keys() - {rank}, key=lambda other: (other < rank, other))
    with ThreadPoolExecutor(_MAX_THREADS, "links") as pool:
        reasons = pool.map(lambda other: _failure(endpoints[other], limit_s), others)
        return [(other, reason) for other, reason in zip(others, reasons, strict=True) if reason]


def _failure(endpoint: Endpoint, limit_s: float) -> str:
    address, port, token = endpoint
    reason = f"no answer for {limit_s:g} s"
    try:
        with socket.create_connection((address, port), limit_s) as connection:
            reason = (
                f"connected, but no data arrived for {limit_s:g} s; check that the hosts have the same MTU"
            )
            answer = connection.makefile("rb").read(_ANSWER_BYTES)
    except TimeoutError:
        return reason
    except OSError as error:
        return str(error.strerror or error).lower()
    return "" if answer == _answer(token) else "another host or program answers there"


def _packed(endpoint: Endpoint) -> bytes:
    return ipaddress.ip_address(endpoint[0].partition("%")[0]).packed
