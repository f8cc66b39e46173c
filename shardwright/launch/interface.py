"""The network interface that leads to an address.

Gloo listens where the host's own name leads, which on many machines is a loopback address: ranks of other hosts then
knock in vain. What leads to rank 0's host leads to the others of the run.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

__all__ = ["leading_to"]

SIOCGIFADDR = 0x8915  # Linux, netdevice(7): the IPv4 address of an interface


def leading_to(address: str, port: int) -> str | None:
    """The name of the interface that this host would use; None if that is the loopback, or cannot be told."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: asks for the route, sends nothing
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except (OSError, ValueError):
        return None
    if own.is_loopback:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Of an interface: its first IPv4 address and all of IPv6; none where the system is not Linux."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(ipaddress.IPv4Address(answer[20:24]))
    except (ImportError, OSError):
        pass
    try:
        with open("/proc/net/if_inet6") as file:
            found += (ipaddress.IPv6Address(int(line.split()[0], 16)) for line in file if line.split()[-1] == name)
    except OSError:
        pass
    return found
