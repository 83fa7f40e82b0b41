"""Which network interface the connections of this process use, from the kernel's tables."""

import fcntl
import ipaddress
import socket
import struct
from collections import Counter
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_ESTABLISHED = "01"  # net/tcp_states.h


def interfaces() -> dict[str, str]:
    """Name and address of every interface with an address (IPv4 before IPv6). Linux only."""
    found = {}
    for line in _lines("/proc/self/net/if_inet6"):
        address, *_, name = line.split()
        found[name] = str(ipaddress.IPv6Address(bytes.fromhex(address)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def in_use(without_port: int) -> tuple[str, str] | None:
    """(interface, address) of most TCP connections of this process; None if it has none.

    Args:
        without_port: ignore connections from or to this port, the rendezvous store's.
    """
    counts: Counter[str] = Counter()
    own = _own_sockets()
    for line in (*_lines("/proc/self/net/tcp")[1:], *_lines("/proc/self/net/tcp6")[1:]):
        _, local, remote, state, *rest = line.split()
        ports = {int(end.partition(":")[2], 16) for end in (local, remote)}
        if state == _ESTABLISHED and rest[5] in own and without_port not in ports:
            counts[_address(local.partition(":")[0])] += 1
    if not counts:
        return None
    address = counts.most_common(1)[0][0]
    return {at: name for name, at in interfaces().items()}.get(address, "?"), address


def _lines(table: str) -> list[str]:
    return Path(table).read_text().splitlines() if Path(table).exists() else []


def _own_sockets() -> set[str]:
    """Inodes of the open sockets of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _address(text: str) -> str:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    words = [text[i : i + 8] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("=I", int(word, 16)) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
