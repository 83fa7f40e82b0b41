"""Hosts can connect even if their names resolve to 127.0.1.1, as in Debian's /etc/hosts."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.hosts import hosts
from tests.ranks import run_ranks
from tests.runs import settings
from trainer.distributed.process_group import process_group

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def own_hosts_file(path: Path, text: str) -> None:
    """Make this process see `text` as /etc/hosts."""
    path.write_text(text)
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(bytes(path), b"/etc/hosts", None, _MS_BIND, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def summed(folder: Path, first: str) -> tuple[float, str | None]:
    """Return the sum of ranks + 1, and the chosen interface; the environment sets none."""
    rank = int(os.environ["RANK"])
    del os.environ["GLOO_SOCKET_IFNAME"]
    of_first = "127.0.1.1" if rank == 0 else first
    own_hosts_file(
        folder / str(rank), f"127.0.1.1 {socket.gethostname()}\n{of_first} first\n127.0.0.1 localhost\n"
    )
    os.environ["MASTER_ADDR"] = "first"
    with process_group(settings("distributed.timeout_s=20").distributed):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
    return float(total), os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.slow
@pytest.mark.netns
def test_host_names_may_resolve_to_loopback(tmp_path: Path) -> None:
    with hosts(2) as members:
        found = run_ranks(
            summed, 3, tmp_path, members[0].address, hosts=[members[0], members[1], members[1]], init=False
        )
    assert found == [(6.0, "eth0")] * 3
