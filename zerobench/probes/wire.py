"""Bytes on the wire: what the kernel says that this process's own TCP sockets have carried.

`getsockopt(TCP_INFO)` needs no privilege and counts payload, without TCP/IP headers and retransmissions: exact, to
the 48-byte headers of gloo's messages. It is the witness of the traffic log: the wire carries what no log was told.
Only Linux has these counters at these places; elsewhere `read` returns None. Traffic through shared memory, RDMA or
another process is not seen, and a socket that closes takes its counts away, so read before the process group is
destroyed.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Collection, Mapping

from zerobench.record import Wire

Counts = Mapping[int, tuple[int, int]]
"""By the socket's inode: (bytes that the peer has acknowledged, bytes received)."""

# struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received, u64 each, in the kernel since 4.1.
# Not tcpi_bytes_sent, which counts retransmissions too.
_ACKED = 120
_LENGTH = 136


def read(exclude_ports: Collection[int] = frozenset()) -> Counts | None:
    """The counts of every connected TCP socket (IPv4 and IPv6) that this process holds; None where they cannot be read.

    exclude_ports: sockets with one of these ports at either end are left out: the rendezvous.
    """
    if not sys.platform.startswith("linux"):
        return None
    counts: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            copy = os.dup(int(name))  # a descriptor of our own, so that closing it leaves the subject's open
        except OSError:
            continue  # closed between listing and looking
        with socket.socket(fileno=copy) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                continue
            try:
                ports = {end.getsockname()[1], end.getpeername()[1]}
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
            except OSError:
                continue  # a listener, or not connected any more
            if ports & set(exclude_ports):
                continue
        if len(info) < _LENGTH:
            return None  # a kernel before 4.1
        counts[int(target[len("socket:[") : -1])] = struct.unpack_from("<QQ" if _LITTLE else ">QQ", info, _ACKED)
    return counts


_LITTLE = sys.byteorder == "little"


def difference(before: Counts | None, after: Counts | None, steps: int) -> Wire | None:
    """What `steps` steps between two reads sent and received; a socket that has appeared counts from zero.

    None where a read was, or where a socket has gone and its count with it.
    """
    if before is None or after is None or not before.keys() <= after.keys():
        return None
    zero = (0, 0)
    return Wire(
        steps=steps,
        sent_nbytes=sum(acked - before.get(inode, zero)[0] for inode, (acked, _) in after.items()),
        received_nbytes=sum(received - before.get(inode, zero)[1] for inode, (_, received) in after.items()),
        sockets=len(after),
    )
