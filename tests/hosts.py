"""Hosts made of network namespaces: each has its own address behind a link of a given rate.

Namespaces are all that separates them: files, hostname and process ids are the machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Process: TypeAlias = subprocess.Popen[Any]

PREFIX = f"rm{os.getpid()}"  # several pytest sessions may build hosts on one machine
_networks = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace with one link, `interface`; the other end is `port` in the namespace of the switch."""

    name: str
    switch: str
    address: str
    interface: str = "eth0"
    port: str = "port0"

    @property
    def namespace_path(self) -> str:
        return f"/run/netns/{self.name}"

    def popen(self, command: Sequence[str], env: dict[str, str] | None = None, **kwargs: Any) -> Process:
        """Start a process here; `env` is added to the caller's environment, the rest is Popen's."""
        # `ip netns exec` replaces itself by the command: the pid is the command's own.
        command = ["ip", "netns", "exec", self.name, *command]
        return subprocess.Popen(command, env={**os.environ, **(env or {})}, **kwargs)

    def link_down(self) -> None:
        """Pull the cable: packets vanish and no error tells the host, as when a switch dies."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def link_up(self) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def lose_packets_to(self, other: Host) -> None:
        """What this host sends to `other` vanishes, as behind a switch with a wrong table; the way back is open."""
        _run("ip", "-n", self.name, "neighbour", "replace", other.address,
             "lladdr", "02:00:00:00:00:00", "dev", self.interface)  # fmt: skip

    def pids(self) -> list[int]:
        """Every process of this host; all were started by the test."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def kill_all(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = "1gbit") -> Iterator[list[Host]]:
    """`count` hosts on one switch; each link is slowed to `rate` in either direction (None: not at all).

    Skips the test where namespaces cannot be had. On leaving, every process of the hosts is killed and the
    namespaces are gone in any case.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("hosts are network namespaces: they need root and iproute2 (ip, tc)")
    _sweep()
    network = f"{PREFIX}-{next(_networks)}"
    switch = f"{network}-switch"
    members = [Host(f"{network}-host{i}", switch, f"10.77.0.{i + 1}", port=f"port{i}") for i in range(count)]
    with contextlib.ExitStack() as cleanup:
        for name in (switch, *(host.name for host in members)):
            try:
                _run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot make a network namespace: {error.stderr.strip()}")
            cleanup.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in members:
            _connect(host, rate)
            cleanup.callback(host.kill_all)
        yield members


def _sweep() -> None:
    """End what a killed session has left: a test's timeout, for example, leaves no time to clean up."""
    folder = Path("/run/netns")
    for name in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        session = re.match(r"rm(\d+)-", name)
        if session and not Path("/proc", session[1]).exists():
            # Another session may be sweeping too.
            with contextlib.suppress(subprocess.CalledProcessError):
                Host(name, switch="", address="").kill_all()
                _run("ip", "netns", "delete", name)


def _connect(host: Host, rate: str | None) -> None:
    here, there = ("-n", host.name), ("-n", host.switch)
    _run("ip", "link", "add", host.interface, "netns", host.name,
         "type", "veth", "peer", "name", host.port, "netns", host.switch)  # fmt: skip
    _run("ip", *there, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", *here, "link", "set", "lo", "up")
    _run("ip", *here, "link", "set", host.interface, "up")
    _run("ip", *here, "address", "add", f"{host.address}/24", "dev", host.interface)
    if rate is not None:
        for namespace, device in ((here, host.interface), (there, host.port)):  # sending, receiving
            _run("tc", *namespace, "qdisc", "add", "dev", device, "root",
                 "tbf", "rate", rate, "burst", "256k", "latency", "50ms")  # fmt: skip


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def torchrun(members: Sequence[Host], index: int, nproc: int, conf: str = "") -> list[str]:
    """The command on host `index`; its environment needs GLOO_SOCKET_IFNAME, where gloo listens.

    `conf` is more of --rdzv-conf.

    torchrun and gloo learn a host's address by looking up its hostname, which here is the machine's and leads
    elsewhere. So options set it: is_host says which host serves the rendezvous (otherwise none recognises itself
    in the endpoint), --local-addr becomes MASTER_ADDR.
    """
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={len(members)}", f"--nproc-per-node={nproc}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={members[0].address}:29400", f"--rdzv-conf=is_host={int(index == 0)},{conf}".rstrip(","),
        f"--local-addr={members[index].address}",
    ]  # fmt: skip
