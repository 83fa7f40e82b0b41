"""Hosts that can't connect are named, by the reason, before gloo connects the ranks."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

from tests.hosts import hosts
from tests.ranks import run_ranks
from tests.runs import settings
from trainer.distributed import links
from trainer.distributed.interfaces import gloo_listener
from trainer.distributed.process_group import process_group
from trainer.distributed.shrink import _sockets
from trainer.errors import RetryableError


def test_the_reason_why_an_address_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listener = gloo_listener()
    assert listener is not None and listener.getsockname()[0] == "127.0.0.1"
    with links._answering(listener, limit_s=5) as endpoint:
        assert links._failure(endpoint, limit_s=5) == ""
        other = "another host or program answers there"
        assert links._failure((*endpoint[:2], "other token"), limit_s=5) == other
    assert links._failure(endpoint, limit_s=5) == "connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # only the connection gets through
        reason = links._failure((*silent.getsockname(), "token"), limit_s=0.1)
    assert reason.startswith("connected, but no data arrived for 0.1 s")


def _messages_about_links(interface: str) -> tuple[float, set[str], list[str]]:
    """Return the sum of ranks + 1, gloo's address, and the messages if both directions are needed."""
    rank, warnings = int(os.environ["RANK"]), []
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    config = settings("distributed.timeout_s=20").distributed
    links.log.warning = lambda _, line: warnings.append(line)  # type: ignore[method-assign]
    with process_group(config):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        ports = [socket.socket(fileno=os.dup(fd)) for fd in _sockets().values()]
        listening = [port for port in ports if port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        addresses = {port.getsockname()[0].removeprefix("::ffff:") for port in listening}
    os.environ["MASTER_PORT"] = "29501"  # the first store may still be open
    try:
        with process_group(config, both_ways=True):
            pass
    except RetryableError as fault:
        warnings.append(str(fault))
    return float(total), addresses, warnings


@pytest.mark.slow
@pytest.mark.netns
def test_a_host_that_others_cannot_reach_is_named_unless_gloo_needs_no_connection_to_it() -> None:
    """gloo connects from the host with the higher address."""
    with hosts(2, rate=None) as members:
        inner = ["ip", "-n", members[1].name]
        subprocess.run([*inner, "link", "add", "inner0", "type", "bridge"], check=True)
        subprocess.run([*inner, "address", "add", "192.0.2.1/24", "dev", "inner0"], check=True)
        subprocess.run([*inner, "link", "set", "inner0", "up"], check=True)
        found = run_ranks(_messages_about_links, 2, "inner0", hosts=members, init=False)
    (first, _, warned), (second, gloo_listens, warnings) = found
    assert first == second == 3.0
    assert gloo_listens == {"192.0.2.1"}, "the address that is checked is gloo's"
    name = socket.gethostname()
    line = f"host 0 ({name}) cannot reach host 1 ({name}, 192.0.2.1:"
    assert [words.startswith(line) for words in warned] == [True, True] and len(warnings) == 1
    assert all(words.splitlines()[0].endswith("network is unreachable") for words in warned)
    assert "set GLOO_SOCKET_IFNAME on that host" in warnings[0] and warnings[0] == warned[1]
