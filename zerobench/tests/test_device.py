"""The device layer in the order that a GPU needs, on a stand-in that shows when the order is wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zerobench import accelerators, device
from zerobench.accelerators import Gpus, NoDevice, places
from zerobench.case import Case
from zerobench.device import Cpu, Cuda
from zerobench.launch.local import Local
from zerobench.probes.clock import time_steps
from zerobench.probes.ledger import Ledger
from zerobench.probes.resident import GpuEye, Residence
from zerobench.readings import CPU, Place
from zerobench.terms import Category, Moment
from zerobench.tests.fake_cuda import FakeCuda

Make = Callable[[FakeCuda], Cuda]


def times_a_step(make: Make) -> None:
    """A step of 3 s, 2 of them on the collectives' stream, after 5 s of somebody else's work: it takes 3 s."""
    cuda = FakeCuda()
    cuda.enqueue(5.0)

    def step() -> None:
        cuda.enqueue(1.0)
        cuda.enqueue(3.0, stream=1)

    seconds = time_steps(step, steps=2, barrier=lambda: cuda.enqueue(0.5), seconds=make(cuda).seconds)
    assert seconds == pytest.approx((3.0, 3.0))


def keeps_peaks_apart(make: Make) -> None:
    """Two phases, the first with the higher peak: the second's is its own."""
    cuda = FakeCuda()
    cuda.allocate(100)
    probe = Residence(make(cuda), GpuEye(Place()), {})
    with probe.phase(0, "backward"):
        cuda.allocate(900)
        cuda.free(900)
    with probe.phase(0, "step"):
        cuda.allocate(50)
        cuda.free(50)
    assert [p.memory.peak_requested for p in probe.peaks] == [1000, 150]


def counts_what_is_in_use(make: Make) -> None:
    """A block that a collective still had when it was freed is not in use once the device is idle."""
    cuda = FakeCuda()
    cuda.allocate(300)
    cuda.free(200, late=True)
    assert make(cuda).in_use() == 100


CLAIMS = (times_a_step, keeps_peaks_apart, counts_what_is_in_use)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.__name__)
def test_the_device_layer(claim: Callable[[Make], None]) -> None:
    claim(lambda cuda: Cuda(0, cuda))


class StartsTooEarly(Cuda):
    """Its clock starts before what was enqueued earlier is done."""

    def seconds(self, step: Callable[[], object]) -> float:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.stamp = self._cuda.now
        step()
        self.synchronize()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class StopsTooEarly(Cuda):
    """It asks for the current stream alone, on which the collectives are not."""

    def seconds(self, step: Callable[[], object]) -> float:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class NeverResets(Cuda):
    def reset_peaks(self) -> None:
        self.synchronize()


class NeverLooksAgain(Cuda):
    def in_use(self) -> int | None:
        return int(self._cuda.memory_stats(self.index)["requested_bytes.all.current"])


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        (StartsTooEarly, times_a_step),
        (StopsTooEarly, times_a_step),
        (NeverResets, keeps_peaks_apart),
        (NeverLooksAgain, counts_what_is_in_use),
    ],
)
def test_a_planted_misordering_is_caught(fault: type[Cuda], claim: Callable[[Make], None]) -> None:
    with pytest.raises(AssertionError):
        claim(lambda cuda: fault(0, cuda))


def test_an_event_that_was_not_waited_for_raises() -> None:
    cuda = FakeCuda()
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    cuda.enqueue(1.0)
    end.record()
    with pytest.raises(RuntimeError, match="not been reached"):
        start.elapsed_time(end)


def test_reading_memory_leaves_no_trace_in_the_peaks() -> None:
    cuda = FakeCuda()
    cuda.allocate(100)
    layer = Cuda(0, cuda)
    layer.reset_peaks()
    assert layer.memory().peak_requested == 100
    assert layer.memory().requested == 100


def test_the_view_from_outside_has_no_cache_in_it() -> None:
    cuda = FakeCuda()
    cuda.allocate(500)
    cuda.free(400)
    probe = Residence(Cuda(0, cuda), GpuEye(Place()), {})
    assert probe.device.memory().reserved == 500  # type: ignore[union-attr]
    probe.device.give_back()
    assert probe.device.memory().reserved == 100  # type: ignore[union-attr]


TWO = Gpus(names=("Stand-in 0", "Stand-in 1"), uuids=("aaaa", "bbbb"), nbytes=(1, 1), nccl="2.29.0")


def test_ranks_are_given_their_places() -> None:
    assert places("cpu", 3) == (CPU, CPU, CPU)
    assert places("cuda", 2, TWO) == (
        Place("cuda:0", "nccl", "gpu", "Stand-in 0", "aaaa"),
        Place("cuda:1", "nccl", "gpu", "Stand-in 1", "bbbb"),
    )
    shared = places("shared-gpu", 3, TWO)
    assert [(p.device, p.backend, p.label, p.shared) for p in shared] == [
        (f"cuda:{r % 2}", "gloo", "shared-gpu", True) for r in range(3)
    ]
    assert places("shared-gpu", 1, TWO)[0].label == "gpu", "a rank that has a GPU to itself does not share it"
    with pytest.raises(NoDevice, match="n = 3 needs 3 GPUs, one a rank; this machine shows 2"):
        places("cuda", 3, TWO)
    with pytest.raises(NoDevice, match="no GPU: torch is built without CUDA"):
        places("shared-gpu", 1, Gpus(why="torch is built without CUDA"))


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    none = FakeCuda(0)
    assert device.why_not(none, {"CUDA_VISIBLE_DEVICES": ""}) == "CUDA_VISIBLE_DEVICES hides every GPU"
    monkeypatch.setattr(device, "hidden", lambda environ: "")
    assert device.why_not(none, {}) == "CUDA cannot be initialised: Found no NVIDIA driver"
    assert device.why_not(FakeCuda(1), {}) == "CUDA finds no device"


def test_the_cpu_is_timed_as_it_goes() -> None:
    ticks: list[int] = []
    assert 0 <= Cpu().seconds(lambda: ticks.append(1)) < 5
    assert ticks == [1] and Cpu().memory() is None


def test_a_run_that_wants_a_gpu_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    case = Case("zero2", "zero2", "mlp-tiny", 2, "bf16", device="cuda")
    with Local() as local:
        record = local.launch(case.run("plain"), deadline_s=5)
        assert local.server_pid is None, "nothing was started for it"
    assert (record.status, record.reason) == ("skip", "no GPU: CUDA_VISIBLE_DEVICES hides every GPU")


def test_a_gpu_that_goes_away_is_an_error_and_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "places", lambda device, n: places(device, n, TWO))  # the launcher saw some
    case = Case("zero2", "zero2", "mlp-tiny", 1, "bf16", device="cuda")
    with Local() as local:
        record = local.launch(case.run("plain"), deadline_s=60)
    assert record.status == "error" and record.samples[0].failure is not None
    assert "raised" in record.reason


def test_a_gpu_gets_larger_models_where_small_ones_cannot_be_seen() -> None:
    cpu, gpu = (Case("ddp", "ddp", "mlp-2m", 1, device=d).run("size-1").case.model for d in ("cpu", "cuda"))
    assert (cpu, gpu) == ("mlp-2m", "mlp-134m")


def test_nothing_else_asks_torch_which_device_it_is() -> None:
    """`torch.cuda` stands in device.py alone (of what zerobench itself runs; adapters talk to their libraries)."""
    package = Path(device.__file__).parent
    users = set()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        if parts[0] in ("tests", "implementations", "mutants"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                users.add(path.name)
    assert users == {"device.py"}


def test_the_ledgers_witness_speaks_for_its_own_device() -> None:
    """What lies elsewhere (Adam's step counts on a CPU beside a GPU) is taken at the ledger's word."""
    requested = 1000
    with Ledger(lambda: requested, "cuda") as ledger:
        ledger.baseline()
        kept = torch.zeros(16)
        held = ledger.holding(0, Moment.BUILT, {Category.OPTIMIZER: [kept]})
        assert ledger.witnessed == held.live == 64
        requested += 4096  # the GPU's allocator has something that no tensor shows
        held = ledger.holding(0, Moment.STEPPED, {Category.OPTIMIZER: [kept]})
        assert ledger.witnessed is not None and ledger.witnessed - held.live == 4096
