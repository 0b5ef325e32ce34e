"""The reference process: all that a rank has but the subject. What it holds is the baseline of what a rank holds.

Each rank forks one before it has done anything itself. The children join a group of their own, run a tiny model
forward, backward and through an optimizer in the run's dtype, and every kind of collective once: so they have the
context, the libraries' handles and workspaces, and the communicators that the ranks will have. Then they let go of all
tensors, are read, and end. Calibrating on the subject instead would take its own overhead for the surroundings'.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping

import torch

from zerobench import device as devices
from zerobench.codec import decode, encode
from zerobench.models import build
from zerobench.probes import allocator
from zerobench.probes.resident import INSTRUMENTS, GpuEye, readings
from zerobench.probes.tapcheck import issue_all
from zerobench.readings import Place, Reading

MODEL = "mlp-tiny"
LONGEST_S = 60.0


def measure(place: Place, rank: int, join: Callable[[], None], dtype: torch.dtype) -> Mapping[str, Reading]:
    """The readings of a reference process. Collective. Call it before this process touches CUDA or joins a group.

    join: initialises a process group of the children, apart from the ranks' own. Where the child fails, every
    instrument has the reason and no value.
    """
    here, there = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(here)
        _live(there, place, rank, join, dtype)
    os.close(there)
    try:
        return _hear(here, child)
    finally:
        os.close(here)


def _live(answer: int, place: Place, rank: int, join: Callable[[], None], dtype: torch.dtype) -> None:
    """In the child; does not return. It leaves by _exit: what would run at exit belongs to the rank."""
    try:
        allocator.prepare()
        eye = GpuEye(place)
        device = devices.of(place)
        device.use()
        join()
        warm(torch.device(place.device), rank, dtype)
        said = encode(readings(device, eye))
    except BaseException as error:
        traceback.print_exc()
        said = {"": f"the reference process failed: {type(error).__name__}: {error}"}
    os.write(answer, json.dumps(said).encode())
    os._exit(0)


def warm(where: torch.device, rank: int, dtype: torch.dtype) -> None:
    """What loads code and opens communicators: a step of a tiny model, and one collective of each kind."""
    world = torch.distributed.get_world_size()
    model = build(MODEL, world_size=world, micro_batches=1, device=str(where))
    model.module.to(dtype)
    optimizer = torch.optim.AdamW(model.module.parameters(), foreach=False)
    model.module(*model.batch(0, rank, 0)).backward()
    optimizer.step()
    issue_all(where)


def _hear(pipe: int, child: int) -> Mapping[str, Reading]:
    """What the child says; it is gone when this returns."""
    text, until = b"", time.monotonic() + LONGEST_S
    try:
        while (left := until - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            text += part
        said = json.loads(text) if text else {"": f"the reference process said nothing in {LONGEST_S:g} s"}
    except ValueError:
        said = {"": "the reference process was cut off"}
    finally:
        os.kill(child, signal.SIGKILL)  # it has answered, or it hangs; unreaped, so the pid is its own
        os.waitpid(child, 0)
    if why := said.pop("", ""):
        return dict.fromkeys(INSTRUMENTS, Reading(None, why))
    return {name: decode(Reading, reading) for name, reading in said.items()}
