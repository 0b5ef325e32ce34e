"""Runs on ranks born elsewhere: each process that torchrun or srun started forks one rank of each run, on its machine.

    with Nodes(job, folder) as nodes:          # in process 0; the others run `agent.serve(job)`
        record = nodes.launch(case.run("plain"), deadline_s=60)

Process 0 orders, gathers what came of each rank, and merges; its own rank is one like the others. A world smaller than
the job is its first ranks. Ranks are new processes for each run, so what a case breaks no later case sees, over gloo and
NCCL alike. A process that is lost cannot be replaced from here: that ends the job, with a LaunchError.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerobench.accelerators import NoDevice, places
from zerobench.case import Run
from zerobench.codec import decode, encode
from zerobench.launch import agent, folders, meeting
from zerobench.launch.agent import Assignment, Hello
from zerobench.launch.autopsy import End
from zerobench.launch.control import Control
from zerobench.launch.job import Job
from zerobench.launch.local import WORKER, LaunchError, Local, refuse_unable
from zerobench.launch.merge import merge
from zerobench.launch.mismatch import Logs
from zerobench.launch.vigil import overload
from zerobench.readings import CPU, Place
from zerobench.record import Record

READY_S = 300.0  # for every process to have imported torch
REPORT_S = 60.0  # beyond the deadline, for a process to end its rank and report
LOOK_S = 2.0  # between looks for signs of life, while reports are awaited
GOODBYE_S = 5.0


class Nodes:
    """A launcher as `Local` is one, in process 0 of a job. A context manager; `close` is the end of the job for all.

    folder: where results go; checkpoints go beside them, since all nodes may see it. Raises LaunchError where a process
    does not come.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self._number = 0
        self._local = Local()
        self._local.warm()
        self._folder = folder.absolute() / f".zerobench-{uuid.uuid4().hex[:16]}"
        try:
            self._control = Control(job)
        except BaseException:
            self._local.close()
            raise
        try:
            self.hellos = self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The machine of each process."""
        return tuple(hello.host for hello in self.hellos)

    def launch(self, run: Run, *, deadline_s: float, suite: str = "", target: str = WORKER) -> Record:
        """See `Local.launch`. A world larger than the job, and a checkpoint without a folder that all see, are skips."""
        n = run.case.world_size
        if n > self.job.world_size:
            return Record(suite, run, "skip", f"n = {n} needs {n} processes; this job has {self.job.world_size}")
        hellos = self.hellos[:n]
        try:
            where = placed(run.case.device, hellos)
        except NoDevice as reason:
            return Record(suite, run, "skip", str(reason))
        if run.checkpoint is not None and (blind := unshared(self._folder, hellos)):
            return Record(suite, run, "skip", blind)
        began = time.monotonic()
        store = meeting.host(n, self.job.address)
        order = Assignment(
            number=self._number,
            run=run.to_json(),
            target=target,
            deadline_s=deadline_s,
            address=self.job.address,
            port=store.port,
            places=where,
            local=local_ranks(hellos),
            peers=tuple(hello.address for hello in hellos),
            spread=len({hello.network for hello in hellos}) > 1,
            memory=tuple(Counter(hello.host for hello in hellos)[hello.host] for hello in hellos),
            shared=self._share(run),
        )
        self._number += 1
        try:
            self._control.say(f"{order.number}/order", encode(order))
            ends, logs = self._gather(order, *agent.do(self._control, self._local, order))
        except BaseException:
            self._local.close()
            raise  # `close` tells the others
        refuse_unable(ends)
        wall_s = time.monotonic() - began
        network = "over the network between the nodes" if order.spread else "on the loopback interface"
        return merge(
            run, ends, suite=suite, deadline_s=deadline_s, wall_s=wall_s, logs=logs, load=overload(), network=network
        )

    def close(self) -> None:
        """End the job: the other processes end, and what was saved is removed."""
        self._local.close()
        try:
            self._control.say(agent.END, True)
            until = time.monotonic() + GOODBYE_S
            while len(self._control.lost(range(1, self.job.world_size))) < self.job.world_size - 1:
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
        except LaunchError:
            pass  # there is nobody to tell
        finally:
            self._control.close()
            folders.remove(self._folder)

    def _greet(self) -> tuple[Hello, ...]:
        """Wait for all; in the order of ranks."""
        token = uuid.uuid4().hex
        try:
            self._folder.mkdir(parents=True)
            (self._folder / agent.TOKEN).write_text(token)
        except OSError as error:
            raise LaunchError(f"{error.filename}: {error.strerror}; --results names another folder") from error
        welcome = {"folder": str(self._folder), "token": token}
        self._control.say(agent.WELCOME, welcome)
        found = [agent.hello(self._control, self._local, **welcome)]
        until = time.monotonic() + READY_S
        for rank in range(1, self.job.world_size):
            while not self._control.said(f"hello/{rank}", 1.0):
                gone = self._control.lost([rank])
                if (rank in gone and self._control.said(f"pulse/{rank}")) or time.monotonic() > until:
                    raise LaunchError(self._lost({rank: gone.get(rank, f"did not come within {READY_S:g} s")}))
            found.append(decode(Hello, self._control.hear(f"hello/{rank}")))
        return tuple(found)

    def _share(self, run: Run) -> str:
        """The folder that all ranks of the run share: new and empty, or what an earlier run saved there; "" for none."""
        if run.checkpoint is None:
            return ""
        kept = self._folder / folders.name(run.checkpoint)
        if run.saved_at is None:
            folders.remove(kept)
        try:
            kept.mkdir(exist_ok=True)
        except OSError as error:
            raise LaunchError(f"{kept}: {error.strerror}; --results names another folder") from error
        return str(kept)

    def _gather(self, order: Assignment, ends: list[End], logs: Logs) -> tuple[list[End], Logs]:
        """What came of every rank, process 0's own first. Raises LaunchError where a process does not say."""
        logs, missing = dict(logs), set(range(1, len(order.places)))
        until, look_at = time.monotonic() + order.deadline_s + REPORT_S, time.monotonic() + LOOK_S
        ends = list(ends)
        for rank in range(1, len(order.places)):
            while not self._control.said(order.part(rank), 1.0):
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_S
                    gone = {
                        r: why
                        for r, why in self._control.lost(missing).items()
                        if not self._control.said(order.part(r))
                    }
                    if gone:
                        raise LaunchError(self._lost(gone))
                if time.monotonic() > until:
                    raise LaunchError(self._lost({rank: f"has not reported {REPORT_S:g} s after the deadline"}))
            other, log = agent.part_from_json(self._control.hear(order.part(rank), forget=True))
            missing.discard(rank)
            ends += other
            logs |= log
        return ends, logs

    def _lost(self, gone: dict[int, str]) -> str:
        hosts = {hello.rank: f" on {hello.host}" for hello in getattr(self, "hellos", ())}
        who = "; ".join(f"process {rank}{hosts.get(rank, '')} {why}" for rank, why in sorted(gone.items()))
        return f"{who}; the job cannot go on without it: start the job again"


def placed(device: str, hellos: Sequence[Hello]) -> tuple[Place, ...]:
    """Where each rank runs. LOCAL_RANK chooses the GPU; where every process of a node was given other GPUs to see (as
    SLURM binds them), each takes its first. Raises NoDevice, also where nodes would need different backends."""
    if device == "cpu":
        return tuple(replace(CPU, host=hello.host) for hello in hellos)
    out = []
    for hello in hellos:
        node = [other for other in hellos if other.group == hello.group]
        seen = [set(other.gpus.uuids) for other in node]
        try:
            if len(node) > 1 and sum(map(len, seen)) == len(set().union(*seen)) > 0:
                place = places(device, 1, hello.gpus)[0]
            elif any(uuids != seen[0] for uuids in seen):
                raise NoDevice("its processes see GPUs that overlap but are not the same")
            else:
                place = places(device, max(other.local_rank for other in node) + 1, hello.gpus)[hello.local_rank]
        except NoDevice as reason:
            raise NoDevice(f"{hello.host}: {reason}") from None
        out.append(replace(place, host=hello.host))
    if len(backends := {place.backend for place in out}) > 1:
        raise NoDevice(f"the nodes would need different backends ({', '.join(sorted(backends))}): give each rank a GPU")
    return tuple(out)


def local_ranks(hellos: Sequence[Hello]) -> tuple[tuple[int, int], ...]:
    """(local rank, local world size) of each, among the ranks that take part."""
    counts = Counter(hello.group for hello in hellos)
    return tuple((hello.local_rank, counts[hello.group]) for hello in hellos)


def unshared(folder: Path, hellos: Sequence[Hello]) -> str:
    """Why these processes have no common folder; "" where they have."""
    blind = sorted({hello.host for hello in hellos if not hello.shared})
    return (
        f"checkpoints need a folder that all nodes share: {folder.parent} of {hellos[0].host} is not on {', '.join(blind)}; "
        "--results names another"
        if blind
        else ""
    )
