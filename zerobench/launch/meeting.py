"""Where processes meet: a store on a port that listens no wider than it must, and the interface that leads to others.

torch's own store would listen on every interface, without authentication (pytorch issue 173909).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.launch.nursery import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0  # for a connection from this process to itself
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def host(world_size: int, address: str = LOOPBACK, port: int = 0) -> TCPStore:
    """A store for `world_size` ranks, on the interface with `address` alone, and a port that the kernel chose (for 0)
    and nobody can take in between. The launcher hosts it, and no rank, so that the death of a rank is not also the death
    of the store. Raises LaunchError.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        family, where = _own(address, port)
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(4 * world_size)
            port = listener.getsockname()[1]
            with socket.create_connection((address, port), CONNECT_S):
                pass  # torch would try for minutes
            with contextlib.suppress(OSError):
                listener.settimeout(CONNECT_S)
                listener.accept()[0].close()
            listener.settimeout(None)
            return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except (OSError, RuntimeError) as error:
        what = (
            "is the loopback interface up (ip link set lo up)?"
            if address == LOOPBACK
            else f"MASTER_ADDR must be an address of the machine of process 0, and port {port} free"
        )
        raise LaunchError(f"{address} cannot be used, and ranks meet there: {error}; {what}") from error


def _own(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """What to bind. Where the name of this machine means the loopback interface to itself (as Debian writes it into
    /etc/hosts) it means something else to others: then every interface."""
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(found[0]).partition("%")[0]).is_loopback and not loopback(address):
        return family, ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    return family, (str(found[0]), port)


def loopback(address: str) -> bool:
    """Whether it means the loopback interface to everyone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("localhost", "")


def address_towards(peer: str) -> str:
    """This machine's address on the way to `peer`; nothing is sent. "" where there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return ""


def interface_towards(peers: Iterable[str]) -> str:
    """The interface that leads to the first of `peers` to which one leads that is not the loopback; "" for none."""
    for peer in peers:
        address = address_towards(peer)
        if address and not loopback(address) and (name := interface(address)):
            return name
    return ""


def interface(address: str) -> str:
    """The name of the interface that has `address`; "" for none."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[5] for row in rows if int(row[0], 16) == int(wanted)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == wanted.packed:
                    return name
    return ""
