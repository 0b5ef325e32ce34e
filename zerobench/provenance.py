"""Where and with what records are made: machine, versions, commit, environment. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zerobench
from zerobench.record import Provenance

PREFIXES = ("OMP_", "MKL_", "TORCH_", "NCCL_", "GLOO_", "CUDA_", "ZEROBENCH_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH")
GIT_S = 5.0


def collect(*, suite: str, suite_digest: str, folder: Path | None = None, **fields: Any) -> Provenance:
    """This machine, now. folder: whose commit it is (the current one). fields: others of Provenance, as given."""
    commit, dirty = checkout(folder or Path.cwd())
    facts: dict[str, Any] = {
        "id": uuid.uuid4().hex[:12],
        "zerobench": zerobench.__version__,
        "suite": suite,
        "suite_digest": suite_digest,
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "backend": "gloo",
        "cpu": cpu_model(),
        "cores": cores(),
        "kernel": f"{platform.system()} {platform.release()}",
        "environment": environment(os.environ),
    }
    return Provenance(**facts | fields)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a measurement, by name; none whose name speaks of a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES) and not any(word in name.upper() for word in SECRETS)
    }


def checkout(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it or are not in it). None where there is no git, no checkout, no commit."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    changes = _git(folder, "status", "--porcelain")
    return commit.strip(), None if changes is None else bool(changes.strip())


def cpu_model() -> str:
    """The processor's name as the kernel has it; "" where it does not say."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def _git(folder: Path, *words: str) -> str | None:
    # Optional locks off: `status` would otherwise write into the index. No fsmonitor: it runs what a checkout names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
