"""The kernel's byte counts against known transfers over loopback."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing

import pytest

from zerobench.probes import wire

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is read on Linux only")


def pair(family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket]:
    with closing(socket.socket(family)) as listener:
        listener.bind((host, 0))
        listener.listen(1)
        client = socket.create_connection(listener.getsockname()[:2])
        server, _ = listener.accept()
    return client, server


def transfer(client: socket.socket, server: socket.socket, nbytes: int) -> None:
    client.sendall(b"x" * nbytes)
    left = nbytes
    while left:
        left -= len(server.recv(left))


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_both_ends_count_every_byte_and_nothing_else(family: socket.AddressFamily, host: str) -> None:
    try:
        client, server = pair(family, host)
    except OSError as error:
        pytest.skip(f"no loopback of this family here: {error}")
    with closing(client), closing(server):
        before = wire.read()
        transfer(client, server, 30_000)
        transfer(server, client, 1_234)
        moved = wire.difference(before, wire.read(), steps=3)
        until = time.monotonic() + 2
        while moved and moved.sent_nbytes < 31_234 and time.monotonic() < until:
            time.sleep(0.01)  # the last acknowledgement may be delayed
            moved = wire.difference(before, wire.read(), steps=3)
    assert moved is not None
    # Both ends are this process's: what one sends the other receives.
    assert moved.received_nbytes == moved.sent_nbytes == 31_234
    assert moved.steps == 3 and moved.sockets >= 2


def test_excluded_ports_sockets_of_files_and_listeners_do_not_count() -> None:
    client, server = pair(socket.AF_INET, "127.0.0.1")
    left, right = socket.socketpair()
    with closing(client), closing(server), closing(left), closing(right):
        counts = wire.read()
        assert counts is not None
        without = wire.read({server.getsockname()[1]})
        assert without is not None
        assert len(counts) - len(without) == 2
        assert client.fileno() >= 0 and client.getpeername(), "reading must leave the subject's descriptors open"


def test_a_new_socket_counts_from_zero_and_one_that_is_gone_makes_the_difference_unknown() -> None:
    before = wire.read()
    client, server = pair(socket.AF_INET, "127.0.0.1")
    with closing(server):
        with closing(client):
            transfer(client, server, 500)
            between = wire.read()
            moved = wire.difference(before, between, 1)
            assert moved is not None and moved.received_nbytes == 500
        assert wire.difference(between, wire.read(), 1) is None
    assert wire.difference(None, before, 1) is None
    assert wire.difference(before, None, 1) is None
