"""A command in a job of several processes: process 0 carries it out, the others bear the ranks that it orders."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.commands_info import fail
from zerobench.launch import job

if TYPE_CHECKING:
    from zerobench.launch.nodes import Nodes


def in_job(command: Callable[[Namespace, Nodes | None], int], arguments: Namespace) -> int:
    """Its exit code: `command`'s here in process 0 and where there is no job. Another process returns 0 when process 0
    has ended, and 3 where something broke."""
    try:
        found = job.find()
    except ValueError as error:
        return fail(str(error))
    if found is None or (getattr(arguments, "dry_run", False) and found.rank == 0):
        return command(arguments, None)
    if getattr(arguments, "dry_run", False):
        return 0
    if getattr(arguments, "trace", False):
        return fail("--trace follows ranks of this machine alone: give it without torchrun or srun")
    from zerobench.launch import agent
    from zerobench.launch.local import LaunchError
    from zerobench.launch.nodes import Nodes

    if found.rank:
        return agent.serve(found)
    try:
        nodes = Nodes(found, Path(arguments.results))
    except LaunchError as error:
        return fail(str(error), 3)
    with nodes:
        return command(arguments, nodes)
