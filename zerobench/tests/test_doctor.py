"""doctor against this machine, and against a stand-in for NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from zerobench import accelerators, doctor
from zerobench.accelerators import Gpus
from zerobench.cli import main
from zerobench.probes import allocator
from zerobench.tests.stand_in import Play, build, play  # noqa: F401

TWO = Gpus("2.13.0", "13.0", "", ("Stand-in 0", "Stand-in 1"), ("aaaa", "bbbb"), (16 << 30, 16 << 30), "2.29.0", True)
NONE = Gpus("2.13.0", "", "torch 2.13.0 is built without CUDA", gloo=True)


def rows(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> dict[str, tuple[str, str]]:
    monkeypatch.setattr(accelerators, "look", lambda: gpus)
    return {what: (here, why) for what, here, why in doctor.examine()}


def test_without_a_gpu_each_instrument_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(monkeypatch, NONE)
    assert found["CUDA"] == found["NCCL"] == ("no", NONE.why)
    assert found["torch"] == ("yes", "2.13.0") and found["gloo"][0] == "yes"
    assert found["malloc's own count"][0] == ("yes" if allocator.in_use() is not None else "no")
    assert found["loopback"][0] == "yes"


def test_what_a_machine_with_two_gpus_can_measure(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:  # noqa: F811
    play("idle")
    found = rows(monkeypatch, TWO)
    assert found["CUDA"] == ("yes", "13.0: Stand-in 0 (17.2 GB), Stand-in 1 (17.2 GB)")
    assert found["NCCL"] == ("yes", "2.29.0")
    assert found["driver, by NVML"] == ("yes", "580.00.stand-in")
    assert found["GPU 0: exclusive use"] == ("yes", "nobody else is on it")
    assert found["GPU 1: NVLink counters"] == ("yes", "3 of 64 bits")
    assert found["GPU 0: clocks"] == ("yes", "multiprocessors at 1980 MHz")


@pytest.mark.parametrize(
    ("scene", "old", "what", "says"),
    [
        ("strangers", False, "exclusive use", ("no", "2 processes share this GPU")),
        ("strangers", False, "NVLink counters", ("no", "2 processes share this GPU")),
        ("na", False, "clocks", ("no", "nvmlDeviceGetClockInfo: Not Supported")),
        (
            "idle",
            True,
            "memory",
            ("yes", "537 MB in use; the driver's reserve included: this NVML cannot tell it apart"),
        ),
        ("mig", False, "MIG instance", ("yes", "MIG-cccc")),
    ],
)
def test_what_is_missing_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    play: Play,  # noqa: F811
    scene: str,
    old: bool,
    what: str,
    says: tuple[str, str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    play(scene, old=old)
    assert rows(monkeypatch, TWO)[f"GPU 0: {what}"] == says


def test_a_gpu_that_is_required_and_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerators, "look", lambda: NONE)
    assert main(["doctor", "--require", "gpu"]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "zerobench: a GPU is required, and there is none: torch 2.13.0 is built without CUDA\n"


def test_a_gpu_that_is_there_gets_the_table(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    play: Play,  # noqa: F811
) -> None:
    play("two")
    monkeypatch.setattr(accelerators, "look", lambda: TWO)
    assert main(["doctor", "--require", "gpu"]) == 0
    assert "Stand-in 1" in capsys.readouterr().out
    monkeypatch.setattr(accelerators, "look", lambda: Gpus(**TWO.__dict__ | {"nccl": ""}))
    assert main(["doctor", "--require", "gpu"]) == 3


def test_the_real_library_is_the_one_that_the_loader_finds() -> None:
    """In a process of its own, nvidia-ml-py finds libnvidia-ml.so.1 where the loader looks: nothing is patched."""
    pytest.importorskip("pynvml")
    environ = os.environ | {"LD_LIBRARY_PATH": str(build(False)), "ZB_NVML_SCENE": "two"}
    code = "import json; from zerobench.nvml import Nvml; n = Nvml(); print(json.dumps([n.driver, len(n.gpus())]))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["580.00.stand-in", 2]


def test_torch_is_asked_in_another_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zerobench.device"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["names"] == [] and said["why"] and said["torch"]


def test_provenance_and_auto_follow_what_is_there(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:  # noqa: F811
    play("two")
    monkeypatch.setattr(accelerators, "hidden", lambda: "")
    monkeypatch.setattr(accelerators, "look", lambda: TWO)
    assert accelerators.provenance() == {
        "device": "Stand-in 0 + Stand-in 1",
        "device_count": 2,
        "backend": "nccl 2.29.0",
        "driver": "580.00.stand-in",
        "interconnect": "nvlink",
    }
    assert (accelerators.automatic([1, 2]), accelerators.automatic([2, 3])) == ("cuda", "cpu")
    assert {p.label for p in accelerators.places("shared-gpu", 3)} == {"shared-gpu"}
    monkeypatch.setattr(accelerators, "hidden", lambda: "no NVIDIA driver")
    assert accelerators.provenance() == {} and accelerators.automatic([1]) == "cpu"
    with pytest.raises(accelerators.NoDevice, match="no GPU: no NVIDIA driver"):
        accelerators.places("cuda", 1)
