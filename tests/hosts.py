"""Hosts that are network namespaces on this machine, each with its own address and a link of a given rate.

They share files, hostname and process IDs.
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

PREFIX = f"rm{os.getpid()}"  # several pytest sessions may create hosts on a machine
_networks = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace whose `interface` is linked to `port` in the namespace of the switch."""

    name: str
    switch: str
    address: str
    interface: str = "eth0"
    port: str = "port0"

    @property
    def namespace_path(self) -> str:
        return f"/run/netns/{self.name}"

    def popen(self, command: Sequence[str], env: dict[str, str] | None = None, **kwargs: Any) -> Process:
        """Start a process on this host; `env` is added to the environment, `kwargs` are passed to Popen."""
        # `ip netns exec` replaces itself with the command, so the pid is the command's.
        command = ["ip", "netns", "exec", self.name, *command]
        return subprocess.Popen(command, env={**os.environ, **(env or {})}, **kwargs)

    def link_down(self) -> None:
        """Drop all packets without an error, like a switch that fails."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def link_up(self) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def lose_packets_to(self, other: Host) -> None:
        """Drop packets from this host to `other`, but not those in the other direction."""
        _run("ip", "-n", self.name, "neighbour", "replace", other.address,
             "lladdr", "02:00:00:00:00:00", "dev", self.interface)  # fmt: skip

    def pids(self) -> list[int]:
        """Return all processes on this host; the test has started all of them."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def kill_all(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = "1gbit") -> Iterator[list[Host]]:
    """Create `count` hosts on one switch; `rate` limits each direction of a link (None: no limit).

    Skips the test if namespaces are not available. At the end, kills all processes and deletes the
    namespaces.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("hosts are network namespaces, which require root and iproute2 (ip, tc)")
    _delete_abandoned()
    network = f"{PREFIX}-{next(_networks)}"
    switch = f"{network}-switch"
    members = [Host(f"{network}-host{i}", switch, f"10.77.0.{i + 1}", port=f"port{i}") for i in range(count)]
    with contextlib.ExitStack() as cleanup:
        for name in (switch, *(host.name for host in members)):
            try:
                _run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot create a network namespace: {error.stderr.strip()}")
            cleanup.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in members:
            _connect(host, rate)
            cleanup.callback(host.kill_all)
        yield members


def _delete_abandoned() -> None:
    """Delete the hosts of sessions that were killed, for example by a timeout."""
    folder = Path("/run/netns")
    for name in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        session = re.match(r"rm(\d+)-", name)
        if session and not Path("/proc", session[1]).exists():
            # Another session may delete them at the same time.
            with contextlib.suppress(subprocess.CalledProcessError):
                Host(name, switch="", address="").kill_all()
                _run("ip", "netns", "delete", name)


def _connect(host: Host, rate: str | None) -> None:
    inside, outside = ("-n", host.name), ("-n", host.switch)
    _run("ip", "link", "add", host.interface, "netns", host.name,
         "type", "veth", "peer", "name", host.port, "netns", host.switch)  # fmt: skip
    _run("ip", *outside, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", *inside, "link", "set", "lo", "up")
    _run("ip", *inside, "link", "set", host.interface, "up")
    _run("ip", *inside, "address", "add", f"{host.address}/24", "dev", host.interface)
    if rate is not None:
        for namespace, device in ((inside, host.interface), (outside, host.port)):  # sending, receiving
            _run("tc", *namespace, "qdisc", "add", "dev", device, "root",
                 "tbf", "rate", rate, "burst", "256k", "latency", "50ms")  # fmt: skip


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def torchrun(members: Sequence[Host], index: int, nproc: int, conf: str = "") -> list[str]:
    """Return the torchrun command for host `index`, which also needs the variable GLOO_SOCKET_IFNAME.

    torchrun and gloo would look up addresses by hostname, but all hosts have the machine's. Therefore is_host
    selects the host of the rendezvous, and --local-addr sets MASTER_ADDR. `conf` is added to --rdzv-conf.
    """
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={len(members)}", f"--nproc-per-node={nproc}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={members[0].address}:29400", f"--rdzv-conf=is_host={int(index == 0)},{conf}".rstrip(","),
        f"--local-addr={members[index].address}",
    ]  # fmt: skip
