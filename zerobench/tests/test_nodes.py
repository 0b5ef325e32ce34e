"""Ranks born elsewhere: what makes a job, where its ranks go, and that two nodes record what one machine records."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerobench import store
from zerobench.accelerators import Gpus, NoDevice
from zerobench.cli import main, parser
from zerobench.codec import encode
from zerobench.launch import job, meeting
from zerobench.launch.agent import Hello
from zerobench.launch.nodes import local_ranks, placed, unshared
from zerobench.record import Record

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
    "SLURM_JOB_ID": "12",
}
TIMEOUT_S = 240.0
SUITE = """version: 1
suite: nodes
launch: {launch}
deadline_s: 120
matrix: {{implementation: [zero2], model: [mlp-tiny], world_size: [2], precision: [bf16]}}
checks: [memory.at_rest, traffic.closure, numerics.gradient]
"""


def test_torchruns_variables_make_a_job() -> None:
    found = job.find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1"})
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.group) == (3, 4, 1, "1")
    assert (found.address, found.port, found.hosted, found.name) == ("node1", 29500, True, "torchrun")
    by_hand = job.find(TORCHRUN)
    assert by_hand is not None and not by_hand.hosted


def test_an_srun_step_makes_a_job_and_process_0_is_on_its_first_node() -> None:
    found = job.find(STEP)
    assert found is not None
    assert (found.rank, found.world_size, found.address, found.hosted, found.name) == (1, 3, "gpu07", False, "srun")
    assert found.port == job.find({**STEP, "SLURM_PROCID": "0"}).port  # type: ignore[union-attr]
    assert job.find({**STEP, **TORCHRUN}) == job.find(TORCHRUN)  # srun starts torchrun, and torchrun starts this


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "4"},  # left over from something: nobody to meet
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a,b"},  # a batch script, a shell of salloc
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {
            **STEP,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "x",
            "MASTER_PORT": "1",
        },  # torchrun with one rank in it
    ],
)
def test_one_process_is_no_job(environ: dict[str, str]) -> None:
    assert job.find(environ) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "4"}, "ranks count from 0"),
        ({"RANK": "first"}, "RANK: a whole number is expected, not 'first'"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT"),
    ],
)
def test_variables_that_contradict_themselves_are_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job.find({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a1,b2", "a1"), ("a[3-9],b", "a3"), ("r[01,04]n[7-8]x", "r01n7x"), ("", "")],
)
def test_the_first_host_of_slurms_short_form(nodes: str, first: str) -> None:
    assert job.first_host(nodes) == first


def test_the_loopback_leads_to_nobody_else() -> None:
    assert meeting.interface("127.0.0.1") == "lo"
    assert meeting.interface_towards(["127.0.0.1", ""]) == ""
    assert meeting.loopback("localhost") and meeting.loopback("::1") and not meeting.loopback("node1")


def two_by_two(*uuids: str) -> list[Hello]:
    """Two nodes with two processes each; each process sees the GPUs that its string names, by a letter each."""
    return [
        Hello(i, f"n{i // 2}", "", f"n{i // 2}", i % 2, "", True, Gpus(names=("H",) * len(u), uuids=tuple(u), nccl="2"))
        for i, u in enumerate(uuids)
    ]


def test_local_rank_chooses_the_gpu() -> None:
    places = placed("cuda", two_by_two("ab", "ab", "cd", "cd"))
    assert [p.device for p in places] == ["cuda:0", "cuda:1"] * 2
    assert [p.uuid for p in places] == list("abcd")
    assert [p.host for p in places] == ["n0", "n0", "n1", "n1"]
    assert [p.device for p in placed("cuda", two_by_two("ab", "ab", "cd", "cd")[:3])] == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_gpu_that_one_process_alone_sees_is_its_first() -> None:
    places = placed("cuda", two_by_two("a", "b", "c", "d"))
    assert [(p.device, p.uuid) for p in places] == [("cuda:0", u) for u in "abcd"]


def test_gpus_that_do_not_suffice_are_said_with_the_node() -> None:
    with pytest.raises(NoDevice, match="n1: n = 2 needs 2 GPUs"):
        placed("cuda", two_by_two("ab", "ab", "c", "c"))
    with pytest.raises(NoDevice, match="n0: its processes see GPUs that overlap"):
        placed("cuda", two_by_two("ab", "bc", "d", "e"))
    with pytest.raises(NoDevice, match="different backends"):
        placed("shared-gpu", two_by_two("ab", "ab", "c", "c"))


def test_local_world_sizes_count_the_ranks_that_take_part() -> None:
    assert local_ranks(two_by_two("", "", "", "")[:3]) == ((0, 2), (1, 2), (0, 1))


def test_a_folder_that_a_node_does_not_see_is_said() -> None:
    seen = two_by_two("", "", "", "")
    blind = Hello(**{**vars(seen[2]), "shared": False})
    assert unshared(Path("/results/x"), seen) == ""
    assert "/results of n0 is not on n1; --results" in unshared(Path("/results/x"), [*seen[:2], blind])


def test_a_suite_that_insists_on_a_job_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*job.TORCH, *job.SLURM):
        monkeypatch.delenv(name, raising=False)
    suite = tmp_path / "nodes.yaml"
    suite.write_text(SUITE.format(launch="torchrun"))
    assert main(["run", str(suite), "--results", str(tmp_path)]) == 2
    assert f"torchrun --nproc-per-node N -m zerobench run {suite}" in capsys.readouterr().err


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are in the checkout only")
def test_the_examples_are_a_script_and_a_manifest_of_commands_that_exist() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm.sh")], check=True)
    runtime, training = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    assert training["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    torchrun, module, *words = training["spec"]["trainer"]["args"]
    assert (torchrun, module) == ("-m", "zerobench")
    assert parser().parse_args(words).results == "/results"


@dataclass(frozen=True)
class Two:
    """Two nodes. prefixes: what stands before a command on each. address: of the first."""

    prefixes: tuple[list[str], list[str]]
    address: str
    apart: bool


@pytest.fixture
def nodes() -> Iterator[Two]:
    """Two network namespaces with an address and a host name each; both on the loopback where those are not allowed."""
    names = [f"zb{os.getpid()}n{i}" for i in (1, 2)]
    links = [f"zb{os.getpid() % 10**8}v{i}" for i in (1, 2)]
    setup = [["ip", "netns", "add", name] for name in names]
    setup.append(
        ["ip", "link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1]]
    )
    for i, (name, link) in enumerate(zip(names, links, strict=True), 1):
        setup += [
            ["ip", "-n", name, "addr", "add", f"10.213.0.{i}/24", "dev", link],
            ["ip", "-n", name, "link", "set", link, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        allowed = bool(shutil.which("ip") and shutil.which("unshare")) and all(
            subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in setup
        )
        if not allowed:
            yield Two(([], []), "127.0.0.1", apart=False)
            return
        first, second = (
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname node{i}; exec "$@"', "sh"]
            for i, name in enumerate(names, 1)
        )
        yield Two((first, second), "10.213.0.1", apart=True)
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def a_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def alone() -> dict[str, str]:
    """This environment without a job's variables."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_")) and k not in job.TORCH}
    return {**mine, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def exact(record: Record) -> dict[str, Any]:
    """What does not depend on the machine, the time or the network. Not the peaks: when a backend's own temporaries are
    there is a matter of time."""
    fields = ("rank", "calls", "holdings", "comparisons", "digests", "reports", "updated_numel")
    samples = [{name: encode(getattr(sample, name)) for name in fields} for sample in record.samples]
    return {"status": record.status, "reason": record.reason, "model": encode(record.model), "samples": samples}


@pytest.mark.timeout(300)
def test_two_nodes_record_what_one_machine_records(nodes: Two, tmp_path: Path) -> None:
    for launch in ("torchrun", "local"):
        (tmp_path / f"{launch}.yaml").write_text(SUITE.format(launch=launch))
    agents, port = [], a_port()
    for i, prefix in enumerate(nodes.prefixes):
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--node-rank", str(i), "--master-addr", nodes.address, "--master-port", port, "-m", "zerobench"]
        command += ["run", str(tmp_path / "torchrun.yaml"), "-q", "--results", str(tmp_path / "nodes")]
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=alone()))
    try:
        said = [agent.communicate(timeout=TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert said[1][0] == "", "only process 0 prints"
    here = [
        sys.executable,
        "-m",
        "zerobench",
        "run",
        str(tmp_path / "local.yaml"),
        "-q",
        "--results",
        str(tmp_path / "one"),
    ]
    subprocess.run(here, check=True, capture_output=True, timeout=TIMEOUT_S, env=alone())
    (there,), (one,) = (list((tmp_path / folder).iterdir()) for folder in ("nodes", "one"))
    theirs, ours = store.read(there), store.read(one)
    assert theirs.records.keys() == ours.records.keys()
    for id, record in theirs.records.items():
        assert exact(record) == exact(ours.records[id]), id
    hosts = ("node1", "node2") if nodes.apart else (platform.node(),) * 2
    assert theirs.provenance.hosts == hosts
    for record in theirs.records.values():
        assert tuple(sample.place.host for sample in record.samples) == hosts
    wired = [record for record in theirs.records.values() if record.run.scenario == "wire"]
    assert (
        all(sample.wire and sample.wire.received_nbytes > 0 for record in wired for sample in record.samples) and wired
    )
    assert ours.provenance.hosts == ()


@dataclass
class Srun:
    """Three processes with the variables of an srun step, and nothing else that joins them."""

    processes: list[subprocess.Popen[str]]

    def said(self) -> str:
        assert self.processes[0].stdout is not None
        return self.processes[0].stdout.readline()

    def record(self, name: str) -> Record:
        assert self.said() == name + "\n", self.processes[0].stderr and self.processes[0].stderr.read()
        return Record.from_json(json.loads(self.said()))


@contextlib.contextmanager
def srun(folder: Path, *launches: str) -> Iterator[Srun]:
    step = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "MASTER_PORT": a_port(),
    }
    command = [sys.executable, "-m", "zerobench.tests.job_process", str(folder), *launches]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=alone() | step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
        )
        for i in range(3)
    ]
    try:
        yield Srun(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.timeout(240)
def test_a_case_that_fails_does_not_end_the_job_but_a_process_that_is_lost_does(tmp_path: Path) -> None:
    with srun(tmp_path, "raises:2:60", "killed:3:60", "sleeps:2:6", "adds:3:60", "adds:4:60", "sleeps:3:60") as job:
        raised = job.record("raises")
        assert raised.status == "error"
        assert raised.reason == "rank 1 raised: ZeroDivisionError: planted (forward, step 2)"
        assert [s.failure.kind for s in raised.samples if s.failure] == ["waiting", "raised"]
        killed = job.record("killed")
        assert killed.reason.startswith("rank 1 died: killed by SIGKILL")
        hung = job.record("sleeps")
        assert hung.reason.startswith("rank 1 hung: no answer within 6 s, in oversleep"), hung.reason
        assert [s.failure.kind for s in hung.samples if s.failure] == ["waiting", "hung"]
        added = job.record("adds")
        assert added.status == "ok"
        assert [sample.reports[0].loss for sample in added.samples] == [3.0] * 3
        assert job.record("adds").reason == "n = 4 needs 4 processes; this job has 3"
        assert job.said() == "sleeps\n"
        job.processes[2].send_signal(signal.SIGKILL)
        error = json.loads(job.said())["error"]
        assert error.startswith(f"process 2 on {platform.node()} has given no sign of life for"), error
        assert error.endswith("start the job again")
        assert job.processes[0].wait(30) == 3
        assert job.processes[1].wait(30) == 0, "the coordinator said that this is the end"
    assert list(tmp_path.iterdir()) == [], "what was shared is removed"


def test_without_process_0_the_others_end(tmp_path: Path) -> None:
    with srun(tmp_path, "sleeps:3:60") as job:
        assert job.said() == "sleeps\n"
        job.processes[0].send_signal(signal.SIGKILL)
        assert [process.wait(60) for process in job.processes[1:]] == [3, 3]
        assert job.processes[1].stderr is not None
        assert "process 1 on" in (told := job.processes[1].stderr.read()) and "process 0" in told
