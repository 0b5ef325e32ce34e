"""What a process shares with everything in it, before and after a subject ran: a guest leaves the house as it was."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def snapshot() -> dict[str, Any]:
    """Settings by name. Environment variables are left out: libraries set their own, and nothing here reads them
    twice."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "torch default dtype": str(torch.get_default_dtype()),
        "torch default device": str(torch.get_default_device()),
        "torch gradients enabled": torch.is_grad_enabled(),
        "torch anomaly detection": torch.is_anomaly_enabled(),
        "torch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "default process group": dist.is_initialized(),
        "working directory": _cwd(),
        "umask": umask,
        "signal handlers": {s.name: repr(signal.getsignal(s)) for s in SIGNALS},
        "exception hook of threads": repr(threading.excepthook),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """One line a setting that differs."""
    return tuple(f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name])


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"
