"""doctor: what this machine can measure, what it cannot, and why. It looks, and changes nothing.

Each row is (what, whether it is here, which one or why not). A "no" takes nothing from the rest: a check that needs
what is missing is skipped with the same reason.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator

from zerobench import accelerators
from zerobench.nvml import Gpu, NoNvml, Nvml, Tenancy
from zerobench.probes import allocator, counters
from zerobench.units import nbytes_text

Row = tuple[str, str, str]


def gpu_obstacle() -> str:
    """Why the GPU suites cannot run here; "" if they can. NVML is not needed to run them, only to measure more."""
    gpus = accelerators.look()
    if gpus.why:
        return f"there is none: {gpus.why}"
    return "" if gpus.nccl else f"torch {gpus.torch} has no NCCL"


def examine() -> list[Row]:
    """The whole table."""
    return [*_torch(), *_nvml(), *_host()]


def _row(what: str, why_not: str, which: str = "") -> Row:
    return (what, "no", why_not) if why_not else (what, "yes", which)


def _torch() -> Iterator[Row]:
    gpus = accelerators.look()
    yield _row("torch", "" if gpus.torch else gpus.why, gpus.torch)
    yield _row(
        "gloo", "" if gpus.gloo else "this torch is built without it", "collectives on a CPU, or on a shared GPU"
    )
    cards = ", ".join(f"{name} ({nbytes_text(n)})" for name, n in zip(gpus.names, gpus.nbytes, strict=True))
    yield _row("CUDA", gpus.why, f"{gpus.cuda}: {cards}")
    yield _row("NCCL", gpus.why or ("" if gpus.nccl else "this torch is built without it"), gpus.nccl)


def _nvml() -> Iterator[Row]:
    try:
        nvml = Nvml()
    except NoNvml as why:
        for what in ("driver, by NVML", "process memory", "NVLink counters", "PCIe counters", "clocks"):
            yield _row(what, str(why))
        return
    with nvml:
        yield _row("driver, by NVML", "", nvml.driver)
        uuids = accelerators.look().uuids
        for i, gpu in enumerate([nvml.find(uuid) for uuid in uuids] if uuids else nvml.gpus()):
            yield from (_of_gpu(f"GPU {i}", row) for row in _gpu(gpu))


def _of_gpu(name: str, row: Row) -> Row:
    return f"{name}: {row[0]}", row[1], row[2]


def _gpu(gpu: Gpu) -> Iterator[Row]:
    if gpu.parent is not None:
        yield _row("MIG instance", gpu.ask("nvmlDeviceGetUUID")[1], gpu.uuid)
    elif gpu.mig_mode():
        yield _row("MIG", "in MIG mode, and CUDA shows no instance of it")
    processes, why = gpu.processes()
    listed = f"{len(processes)} listed" if processes is not None else ""
    yield _row("pids", why, f"{listed}; in a container they may be hidden or the host's" if listed else "")
    used = gpu.used()
    held = f"{nbytes_text(used.value)} in use" if used.value is not None else ""
    yield _row("memory", used.why if used.value is None else "", "; ".join(filter(None, (held, used.why))))
    tenancy = Tenancy(gpu)
    yield _row("exclusive use", tenancy.others(), "nobody else is on it")
    now = counters.read(tenancy)
    for what, name in (("NVLink counters", "nvlink_sent"), ("PCIe counters", "pcie_sent")):
        count = now.counts.get(name, ())
        which = f"{len(count)} of {count[0].bits} bits" if count else ""
        yield _row(what, now.why.get(name, ""), which)
    clock = gpu.clock_mhz()
    yield _row("clocks", clock.why, f"multiprocessors at {clock.value} MHz")


def _host() -> Iterator[Row]:
    counts = allocator.in_use() is not None
    yield _row(
        "malloc's own count", "" if counts else "no mallinfo2 in this C library", "the ledger's witness on a CPU"
    )
    yield _row("resident set", _readable("/proc/self/smaps_rollup"), "/proc/self/smaps_rollup")
    yield _row("bytes on sockets", "" if sys.platform.startswith("linux") else "TCP_INFO is Linux's", "TCP_INFO")
    yield _row("loopback", _loopback(), "127.0.0.1 answers")
    yield _row("cores", "", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    # pytest-benchmark imports it for every file it writes; two distributions install it over each other.
    yield _row("import cpuinfo", _importable("cpuinfo"), "pytest-benchmark can write its files")


def _readable(path: str) -> str:
    try:
        with open(path, "rb"):
            return ""
    except OSError as error:
        return str(error)


def _importable(name: str) -> str:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{error}; reinstall py-cpuinfo (removing one of py-cpuinfo and py-cpuinfo2 removes the other's files)"
    return ""


def _loopback() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            return ""
    except OSError as error:
        return str(error)
