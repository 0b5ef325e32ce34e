"""Whether this process is one of several that torchrun or srun started, and how they find each other. Pure.

The rule: the four variables of torch's `env://` (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as torchrun, Kubeflow and
people set them, make a job where WORLD_SIZE is more than 1. Without them the variables of an srun *step* do, where
SLURM_STEP_NUM_TASKS is more than 1. Not SLURM_NTASKS: that is also set in a batch script and in a shell of salloc, where
there is one process, and the others that it would wait for do not exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the range from which kernels take ports for connections


@dataclass(frozen=True)
class Job:
    """One process's place among `world_size`. address, port: of the store through which they talk; hosted: somebody
    else (torchrun's agent) hosts it already, else process 0 does. name: what started it, for messages. attempt: apart
    from what an earlier attempt left in a store. group: the node, as the launcher counts nodes, "" if it does not say.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    hosted: bool
    name: str
    attempt: str = ""
    group: str = ""


def find(environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process is part of; None where it stands alone. Raises ValueError for variables that contradict
    themselves."""
    if all(environ.get(name) for name in TORCH):
        return _torch(environ)
    if all(environ.get(name) for name in SLURM):
        return _slurm(environ)
    return None


def command(suite: str) -> str:
    """What to type so that `suite` runs in a job."""
    return f"torchrun --nproc-per-node N -m zerobench run {suite}"


def _torch(environ: Mapping[str, str]) -> Job | None:
    rank, n = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if n < 2:
        return None
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    job = Job(
        rank=rank,
        world_size=n,
        local_rank=_number(environ, "LOCAL_RANK", str(rank)),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
        hosted=agent,
        name="torchrun" if agent else "RANK and WORLD_SIZE in the environment",
        attempt="-".join(environ.get(f"TORCHELASTIC_{part}", "") for part in ("RUN_ID", "RESTART_COUNT")),
        group=environ.get("GROUP_RANK", ""),
    )
    return _checked(job, "RANK", "WORLD_SIZE")


def _slurm(environ: Mapping[str, str]) -> Job | None:
    n = _number(environ, "SLURM_STEP_NUM_TASKS")
    if n < 2:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address = environ.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise ValueError(
            "srun started this process, but neither MASTER_ADDR nor SLURM_STEP_NODELIST says where process 0 is"
        )
    step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    number = sum(int(part) * factor for part, factor in zip(step, (101, 1), strict=True) if part.isdecimal())
    job = Job(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=n,
        local_rank=_number(environ, "SLURM_LOCALID", environ["SLURM_PROCID"]),
        address=address,
        port=_number(environ, "MASTER_PORT", str(_FIRST_PORT + number % _PORTS)),
        hosted=False,
        name="srun",
        attempt="-".join((*step, environ.get("SLURM_RESTART_COUNT", "0"))),
        group=environ.get("SLURM_NODEID", ""),
    )
    return _checked(job, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def first_host(nodes: str) -> str:
    """The first name of SLURM's short form: "gpu[003-010,12],login" begins with gpu003. "" for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _checked(job: Job, rank: str, world_size: str) -> Job:
    if job.rank >= job.world_size:
        raise ValueError(
            f"{rank}={job.rank} and {world_size}={job.world_size}: ranks count from 0 to one below the world size"
        )
    return job


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name) or default
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name}: a whole number is expected, not {text!r}")
    return int(text)
