"""Find the network interface through which other hosts reach this host.

gloo listens at the address to which the host name resolves. Debian's /etc/hosts maps it to 127.0.1.1, which
other hosts cannot reach, and in a container it may not resolve at all. In both cases, the route to rank 0's
store determines the interface.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from urllib.parse import urlsplit

from trainer.errors import UserError

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>


def address_towards(host: str | None) -> str | None:
    """Return this host's address on the route to `host`, without sending a packet; None without a route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as udp:
                udp.connect(address)
                return str(udp.getsockname()[0])
    return None


def store_host(init_method: str | None) -> str | None:
    """Return the host of rank 0's store; None if the rendezvous is a file."""
    url = urlsplit(init_method or "")
    return os.environ.get("MASTER_ADDR") if url.scheme == "env" else url.hostname


def choose_interface(rank: int, hosts: Sequence[int], addresses: Sequence[str | None]) -> None:
    """Make gloo listen where other hosts can reach it, unless the environment sets an interface.

    Args:
        addresses: for each rank, its host's address on the route to the store.

    Raises:
        UserError: the environment sets an interface that this host does not have.
    """
    existing = [name for _, name in socket.if_nameindex()]
    # The watch would take gloo's own error for one that another rank has caused.
    for name in filter(None, os.environ.get(_VARIABLE, "").split(",")):
        if name not in existing:
            raise UserError(
                f"rank {rank}: {_VARIABLE}={os.environ[_VARIABLE]}, but its host {socket.gethostname()} has "
                f"no interface {name}; set one of {', '.join(existing)} that the other hosts can reach"
            )
    known = [address for address in addresses if not is_loopback(address)]
    own_name = address_towards(socket.gethostname())  # the address to which the host name resolves
    if _VARIABLE in os.environ or len(set(hosts)) == 1 or not known or not is_loopback(own_name):
        return  # if all addresses are loopback, the hosts are one machine
    own = addresses[rank]
    if is_loopback(own):  # the store is on this host: use the route to another host
        own = address_towards(known[0])
    for name in existing:
        if _address_of(name) == own:
            os.environ[_VARIABLE] = name
            return


def gloo_listener() -> socket.socket | None:
    """Open a port at the address at which gloo listens on this host; None if the address is unknown.

    This is the first address of the interface in GLOO_SOCKET_IFNAME or, without that variable, the first
    address of this host to which the host name resolves, or else the loopback address.
    """
    if interface := os.environ.get(_VARIABLE, "").split(",")[0]:
        addresses = [_address_of(interface)]
    else:
        found = []
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses = [*(str(each[4][0]) for each in found), "127.0.0.1"]
    for address in filter(None, addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), family=family)
    return None


def _address_of(interface: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        answer = fcntl.ioctl(any_, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


def is_loopback(address: str | None) -> bool:
    """Return whether `address` is None or a loopback address, so that other hosts cannot reach it."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback
