"""Which GPUs this machine shows, asked by the side that judges: no torch here, and no context on a card.

torch is asked in a process of its own (`python -m zerobench.device`), seconds once a run; where there is no driver
library nothing is asked.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zerobench.codec import decode
from zerobench.nvml import NoNvml, Nvml
from zerobench.readings import CPU, SHARED_GPU, Place

ASK_S = 120.0


class NoDevice(Exception):
    """A run asks for GPUs that this machine has not; the reason."""


@dataclass(frozen=True)
class Gpus:
    """What CUDA shows through torch. why: there is none, and the reason. names, uuids, nbytes: one a GPU, in CUDA's
    order, which is not NVML's. nccl: its version, "" where this torch has none."""

    torch: str = ""
    cuda: str = ""  # the version torch was built for; "" for none
    why: str = ""
    names: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    nccl: str = ""
    gloo: bool = False

    @property
    def count(self) -> int:
        return len(self.names)


@cache
def look() -> Gpus:
    """Ask torch, in another process. Never raises: what went wrong is `why`."""
    command = [sys.executable, "-m", "zerobench.device"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, env=environ)
        return decode(Gpus, json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Gpus(why=f"torch did not answer in {ASK_S:g} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Gpus(why=f"torch cannot be asked: {last}")


def hidden(environ: Mapping[str, str] = os.environ) -> str:
    """Why no GPU can be there, by what costs nothing to ask: a variable that hides all, no driver. "" if one may be."""
    if environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 is not there)"
    return ""


def places(device: str, world_size: int, gpus: Gpus | None = None) -> tuple[Place, ...]:
    """Where each of `world_size` ranks of this machine runs.

    device: one of `readings.DEVICES`. NCCL wants a GPU a rank (it refuses two on one); ranks that share one talk
    through gloo, which stages CUDA tensors through the host. Raises NoDevice.
    """
    if device == "cpu":
        return (CPU,) * world_size
    why = hidden() if gpus is None else ""
    gpus = gpus or (Gpus(why=why) if why else look())
    if gpus.why:
        raise NoDevice(f"no GPU: {gpus.why}")
    alone = world_size <= gpus.count
    if not alone and device != SHARED_GPU:
        raise NoDevice(f"n = {world_size} needs {world_size} GPUs, one a rank; this machine shows {gpus.count}")
    backend, label = ("nccl", "gpu") if alone else ("gloo", SHARED_GPU)
    return tuple(
        Place(f"cuda:{i}", backend, label, gpus.names[i], gpus.uuids[i])
        for i in (rank % gpus.count for rank in range(world_size))
    )


def automatic(world_sizes: Iterable[int]) -> str:
    """The device of `--device auto` where nothing else says one: CUDA if every rank can have a GPU, else the CPU."""
    try:
        places("cuda", max(world_sizes))
    except NoDevice:
        return "cpu"
    return "cuda"


def provenance() -> dict[str, Any]:
    """The fields of `record.Provenance` that speak of accelerators; none where there are none."""
    gpus = Gpus() if hidden() else look()
    if not gpus.count:
        return {}
    found: dict[str, Any] = {"device": " + ".join(sorted(set(gpus.names))), "device_count": gpus.count}
    found["backend"] = f"nccl {gpus.nccl}" if gpus.nccl else "gloo"
    try:
        with Nvml() as nvml:
            found["driver"] = nvml.driver
            found["interconnect"] = interconnect(nvml, gpus.uuids)
    except NoNvml:
        pass  # doctor says why; a class of machines without a driver's number is a class of its own
    return found


def interconnect(nvml: Nvml, uuids: Iterable[str]) -> str:
    """ "nvlink" if every one of several GPUs has an active link, "pcie" if not, "" for one GPU."""
    gpus = [nvml.find(uuid) for uuid in uuids]
    if len(gpus) < 2:
        return ""
    return "nvlink" if all(gpu.active_links() for gpu in gpus) else "pcie"
