"""Commit, machine and environment; nothing secret, and no failure where there is no git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zerobench import provenance
from zerobench.provenance import checkout, collect, environment
from zerobench.record import Provenance


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_and_dirt(tmp_path: Path) -> None:
    assert checkout(tmp_path) == (None, None)
    git(tmp_path, "init", "--quiet")
    assert checkout(tmp_path) == (None, None)  # no commit yet
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert checkout(tmp_path) == (head, False)
    (tmp_path / "file").write_text("2")
    assert checkout(tmp_path) == (head, True)


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(Path.cwd()) == (None, None)


def test_a_git_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "GIT_S", 0.1)
    assert checkout(tmp_path) == (None, None)


def test_the_environment_is_kept_by_prefix_and_without_secrets() -> None:
    variables = {
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "ZEROBENCH_API_KEY": "x",
        "TORCH_HUB_token": "x",
        "CUDA_PASSWORD": "x",
        "HOME": "/home/someone",
        "MY_OMP_THING": "x",
    }
    assert environment(variables) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}


def test_collect_fills_in_this_machine_and_takes_the_rest(tmp_path: Path) -> None:
    found = collect(suite="smoke", suite_digest="d", folder=tmp_path, judge="claim", device="cpu", checks=("a",))
    assert (found.suite, found.judge, found.checks, found.commit) == ("smoke", "claim", ("a",), None)
    assert found.python and found.torch and found.cpu and found.kernel and found.host and found.cores >= 1
    assert found.started.endswith("+00:00")
    assert Provenance.from_json(found.to_json()) == found
    assert collect(suite="smoke", suite_digest="d", folder=tmp_path).id != found.id
