"""Faults of the network. Ranks need the loopback interface and nothing else: no name service, no IPv6, no free port of
a given number."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from zerobench.tests.faults.bench import Bench, done
from zerobench.tests.faults.namespaces import inside
from zerobench.tests.faults.row import Row, Wrong
from zerobench.tests.faults.verdicts import RUNS, SUITE, kept, read, undisturbed

_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
LOOPBACK_UP = f'{sys.executable} -c "from zerobench.tests.faults.reach_rows import loopback_up; loopback_up()"'
NO_LISTENERS = "cat /proc/net/tcp /proc/net/tcp6 > sockets.txt 2>/dev/null || true"


def loopback_up() -> None:
    """What `ip link set lo up` does, where there is no `ip`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


def rows() -> list[Row]:
    same = "everything: the undisturbed verdict"
    return [
        Row("the network", "loopback only", "there is no other interface", f"{same}, and no socket listens", _loopback),
        Row("the network", "no IPv6", "IPv6 is switched off", same, _no_ipv6),
        Row("the network", "no name", "the host's name does not resolve", same, _no_name),
        Row("the network", "port taken", "MASTER_ADDR and MASTER_PORT name a port that is taken", same, _taken),
        Row(
            "the network",
            "no loopback",
            "the loopback interface is down",
            "nothing is blamed on a subject",
            _down,
            True,
        ),
        Row(
            "the network",
            "no such interface",
            "GLOO_SOCKET_IFNAME names an interface that is not there",
            "nothing is blamed on a subject",
            _no_interface,
            True,
        ),
    ]


def _same(bench: Bench, name: str, flags: list[str], before: str) -> str:
    alone = bench.apart(name)
    code, out, err = alone.run(*SUITE, "--json", "verdict.json", before=inside(flags, before, NO_LISTENERS))
    if code or read(alone.folder / "verdict.json") != undisturbed(bench):
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    if kept(alone.results()[0], err) != RUNS:
        raise Wrong("case lost", err[-600:])
    sockets = (alone.folder / "sockets.txt").read_text().splitlines()
    if listening := [line for line in sockets if len(line.split()) > 3 and line.split()[3] == "0A"]:
        raise Wrong("process left", f"sockets that listen: {listening}")
    return "nothing"


def _loopback(bench: Bench) -> str:
    return _same(bench, "loopback", ["-n"], LOOPBACK_UP)


def _no_ipv6(bench: Bench) -> str:
    return _same(
        bench, "no-ipv6", ["-n"], f"{LOOPBACK_UP} && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true"
    )


def _no_name(bench: Bench) -> str:
    rename = f"{sys.executable} -c \"import socket; socket.sethostname('nowhere.invalid')\""
    return _same(bench, "no-name", ["-n", "-u"], f"{LOOPBACK_UP} && {rename}")


def _taken(bench: Bench) -> str:
    alone = bench.apart("taken")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(taken.getsockname()[1])}
        code, out, err = alone.run(*SUITE, "--json", "verdict.json", env=environ)
    if code or read(alone.folder / "verdict.json") != undisturbed(bench):
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    return "nothing"


def _down(bench: Bench) -> str:
    alone = bench.apart("down")
    code, out, err = alone.run(*SUITE, before=inside(["-n"], ":"))
    if code != 3 or "is the loopback interface up" not in err or "fail" in out:
        raise Wrong("wrong verdict" if "fail" in out else "not told", f"exit code {code}: {(out + err)[-900:]}")
    return err.strip().splitlines()[0]


def _no_interface(bench: Bench) -> str:
    """Not a failed subject and not a pass: the measurement is invalid, exit code 6."""
    alone = bench.apart("no-interface")
    code, out, err = done(alone.start("run", "short.yaml", "-k", "ddp", env={"GLOO_SOCKET_IFNAME": "nowhere0"}))
    if code != 6 or "could not meet" not in out:
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    return next(line.strip() for line in out.splitlines() if "could not meet" in line)[:300]
