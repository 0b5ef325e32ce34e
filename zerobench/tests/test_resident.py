"""What NVML and the kernel are asked, and what is made of their answers. NVML here is a stand-in built from C; the
readings that the check judges are made by hand, and the last test runs real ranks on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerobench.case import Case
from zerobench.checks import devices
from zerobench.checks.check import Judgement, NotApplicable, View
from zerobench.finding import Status
from zerobench.judge import judge
from zerobench.launch.local import Local
from zerobench.nvml import Gpu, Nvml, Tenancy
from zerobench.probes.resident import INSTRUMENTS, host, levels
from zerobench.readings import CPU, SHARED_GPU, Level, Place, Reading, Resident
from zerobench.record import Holding, ModelFacts, Record, Sample
from zerobench.terms import Moment
from zerobench.tests.made import CLAIMS
from zerobench.tests.stand_in import GIB, MIB, PID, Play, play  # noqa: F401

WHOLE = "the whole device, which nobody else uses"


def gpu(uuid: str = "aaaa") -> Gpu:
    return Nvml().find(uuid)


def test_gpus_are_found_by_uuid_and_not_by_place(play: Play) -> None:  # noqa: F811
    play("two")
    assert [g.uuid for g in Nvml().gpus()] == ["GPU-aaaa", "GPU-bbbb"]
    assert gpu("bbbb").name == "NVML stand-in 1"
    assert gpu("bbbb").used() == Reading(2 * GIB)
    assert gpu("dddd").used() == Reading(None, "nvmlDeviceGetHandleByUUID: Not Found")
    assert gpu("").used() == Reading(None, "CUDA shows no uuid")


def test_a_process_whose_pid_is_shown_is_read_by_it(play: Play) -> None:  # noqa: F811
    library = play("idle")
    mine = Tenancy(gpu(), PID)
    library.zb_scene(b"two", PID)
    assert mine.nbytes() == Reading(700 * MIB, "this process")
    assert mine.others() == ""


def test_a_pid_that_was_there_before_is_somebody_elses(play: Play) -> None:  # noqa: F811
    play("two")
    late = Tenancy(gpu(), PID)  # the number is listed before this process has a context: another namespace's
    assert late.nbytes().value is None
    assert "was in use before" in late.nbytes().why


def test_hidden_pids_leave_the_device_if_it_was_idle(play: Play) -> None:  # noqa: F811
    library = play("idle")
    alone = Tenancy(gpu(), PID)
    library.zb_open()
    assert alone.nbytes() == Reading(GIB, WHOLE), "the host's number for this process is listed: one, and new"
    library.zb_scene(b"hidden", PID)
    assert alone.nbytes() == Reading(GIB, WHOLE)
    assert Tenancy(gpu(), PID).nbytes().value is None, "somebody was there before: the total is not this process's"


def test_a_gpu_that_others_use_has_no_reading(play: Play) -> None:  # noqa: F811
    library = play("idle")
    mine = Tenancy(gpu(), PID)
    library.zb_scene(b"strangers", PID)
    assert mine.others() == "2 processes share this GPU"
    assert mine.nbytes() == Reading(None, "2 processes share this GPU, and this process's own bytes are not available")


def test_bytes_that_are_not_available_are_not_zero(play: Play) -> None:  # noqa: F811
    library = play("idle")
    mine = Tenancy(gpu(), PID)
    library.zb_scene(b"na", PID)
    assert mine.nbytes() == Reading(GIB, WHOLE), "the pid is shown, its bytes are not: the device's are"
    assert gpu().clock_mhz() == Reading(None, "nvmlDeviceGetClockInfo: Not Supported")


def test_the_driver_goes_away_in_the_middle(play: Play) -> None:  # noqa: F811
    library = play("idle")
    mine = Tenancy(gpu(), PID)
    library.zb_scene(b"two", PID)
    assert mine.nbytes().value is not None
    library.zb_lose()
    assert mine.nbytes() == Reading(None, "nvmlDeviceGetComputeRunningProcesses_v3: GPU is lost")
    assert mine.gpu.used().value is None and "GPU is lost" in mine.gpu.used().why


def test_an_old_library_cannot_tell_the_reserve_apart_and_says_so(play: Play) -> None:  # noqa: F811
    library = play("idle", old=True)
    mine = Tenancy(gpu(), PID)
    assert gpu().used().value == 512 * MIB
    library.zb_scene(b"two", PID)
    assert mine.nbytes() == Reading(700 * MIB, "this process"), "the list's older version is asked"
    assert "reserve included" in gpu().used().why and gpu().used().value == GIB + 512 * MIB


@pytest.mark.parametrize("shown", ["", "MIG-cccc"])
def test_in_mig_mode_the_instance_is_read_and_not_the_gpu(
    play: Play,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    play("mig")
    instance = gpu()
    assert instance.uuid == "MIG-cccc" and instance.parent is not None
    assert instance.used() == Reading(256 * MIB)
    assert gpu("bbbb").parent is None, "the other GPU is not in MIG mode"


def test_no_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerobench.nvml import NoNvml

    pynvml = pytest.importorskip("pynvml")

    def refuse(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", refuse)
    with pytest.raises(NoNvml, match="NVML Shared Library Not Found"):
        Nvml()


def test_the_kernels_sums_are_read(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text("00400000-7fff [rollup]\nRss:    2048 kB\nPss:    1024 kB\nPss_Anon:  8 kB\n")
    assert host(rollup) == {"rss": Reading(2 << 20), "pss": Reading(1 << 20)}
    assert host(tmp_path / "none")["rss"].value is None
    rollup.write_text("Rss:    2048 kB\n")
    assert host(rollup)["pss"].value is None


def test_raw_baseline_and_difference_are_all_kept() -> None:
    raw = {"rss": Reading(100), "nvml": Reading(None, "lost"), "pss": Reading(7)}
    base = {"rss": Reading(40), "nvml": Reading(9), "pss": Reading(None, "cut off")}
    assert levels(raw, base) == (
        Level("rss", 100, 40, 60),
        Level("nvml", None, 9, None, "lost"),
        Level("pss", 7, None, None, "baseline: cut off"),
    )


# -- the check ---------------------------------------------------------------------------------------------------------

SIZES = {"size-1": 1_000_000, "size-2": 2_000_000, "size-3": 4_000_000}
CASE = Case("zero2", "zero2", "mlp-2m", 1, "bf16")


def seen(psi: int, moment: Moment, **grows: float) -> Resident:
    """Every instrument at some level of its own plus what it grows by a parameter."""
    bytes_of = {name: (i + 1) * 10**8 + int(grows[name] * psi) for i, name in enumerate(grows)}
    return Resident(1, moment, tuple(Level(name, raw, 10**8, raw - 10**8) for name, raw in bytes_of.items()))


def view(place: Place = CPU, late: int = 0, ledger: float = 9.0, **grows: float) -> View:
    """Three sizes of a stage 2 at n = 2 in bf16. late: bytes that malloc still has at BACKWARD of the smallest size."""
    records = {}
    for name, psi in SIZES.items():
        residents = [seen(psi, m, **grows) for m in (Moment.BACKWARD, Moment.STEPPED)]
        if late and name == "size-1":
            first = residents[0].levels
            residents[0] = replace(residents[0], levels=(replace(first[0], raw=(first[0].raw or 0) + late), *first[1:]))
        holdings = tuple(
            Holding(1, m, {}, live=int(ledger * psi), unclaimed=0) for m in (Moment.BACKWARD, Moment.STEPPED)
        )
        sample = Sample(0, holdings=holdings, residents=tuple(residents), place=place)
        records[name] = Record("made", CASE.run(name), "ok", claims=CLAIMS, model=ModelFacts(psi), samples=(sample,))
    return View(CASE, records, record=records["size-1"])


GPU = Place("cuda:0", "nccl", "gpu")


def said(view: View) -> Judgement:
    return devices.device(view)


def test_levels_do_not_count_and_slopes_do() -> None:
    assert said(view(malloc=9.0, rss=8.2)).claim is Status.PASS
    assert said(view(malloc=13.0, rss=8.2)).claim is Status.FAIL, "4 bytes a parameter that no tensor holds"
    assert said(view(malloc=9.0, rss=13.0)).claim is Status.FAIL
    assert said(view(malloc=8.5, rss=9.0)).claim is Status.FAIL, "the ledger counts what is not there"


def test_objects_beside_tensors_are_let_through_and_a_copy_of_a_shard_is_not() -> None:
    """At n = 1: a quarter of 2 bytes a parameter, more than 2 % of 9; and in one direction only."""
    assert said(view(malloc=9.45, rss=9.0)).claim is Status.PASS
    assert said(view(malloc=9.55, rss=9.0)).claim is Status.FAIL
    assert said(view(malloc=11.0, rss=9.0)).claim is Status.FAIL, "a 16-bit copy"
    assert said(view(malloc=8.7, rss=9.0)).claim is Status.FAIL


def test_a_buffer_that_a_thread_held_for_a_moment_is_not_growth() -> None:
    assert said(view(late=5_000_000, malloc=9.0, rss=9.0)).claim is Status.PASS


def test_on_a_gpu_nvml_is_held_against_reserved_and_the_ledger_against_requested() -> None:
    good = {"requested": 9.0, "reserved": 9.3, "nvml": 9.35}
    word = said(view(GPU, malloc=0.0, rss=0.0, **good))
    assert word.claim is Status.PASS and "nvml as reserved within 2%" in word.expected
    assert said(view(GPU, malloc=0.0, rss=0.0, **good | {"nvml": 11.3})).claim is Status.FAIL, "2 Psi outside torch"
    assert said(view(GPU, malloc=0.0, rss=0.0, **good | {"requested": 11.0})).claim is Status.FAIL


def test_what_could_not_be_read_is_named_and_not_passed() -> None:
    word = said(view(GPU, malloc=0.0, rss=0.0, requested=9.0, reserved=9.3))
    assert word.claim is Status.PASS
    assert any(line.startswith("nvml not judged: ") for line in word.detail)
    with pytest.raises(NotApplicable, match="the system's view was not taken"):
        said(view(GPU, malloc=0.0, rss=0.0))


def test_two_sizes_are_no_slope() -> None:
    three = view(malloc=9.0, rss=9.0)
    two = {k: v for k, v in three.records.items() if k != "size-3"}
    with pytest.raises(NotApplicable, match="at least three sizes"):
        said(View(CASE, two, record=two["size-1"]))


def test_a_shared_gpu_is_not_timed() -> None:
    from zerobench.checks.timing import step_time
    from zerobench.tests import made

    shared = Place("cuda:0", "gloo", SHARED_GPU)
    record = made.record(change=lambda s: replace(s, place=shared))
    with pytest.raises(NotApplicable, match="ranks share a GPU"):
        step_time(View(made.CASE, {"plain": record}, record=record))


# -- real ranks, on the CPU --------------------------------------------------------------------------------------------


def test_ranks_are_read_beside_their_reference_processes(local: Local) -> None:
    record = local.launch(replace(CASE, world_size=2).run("size-1"), deadline_s=60)
    assert record.status == "ok", record.reason
    for sample in record.samples:
        assert [r.moment for r in sample.residents] == [Moment.FORWARD, Moment.BACKWARD, Moment.STEPPED]
        for resident in sample.residents:
            for instrument in ("malloc", "rss"):
                level = resident.level(instrument)
                assert level is not None and level.raw is not None and level.baseline is not None, level
                assert level.difference == level.raw - level.baseline
        held = next(h for h in sample.holdings if h.step == 1 and h.moment is Moment.STEPPED)
        malloc = sample.residents[-1].level("malloc")
        assert malloc is not None and malloc.difference is not None
        assert 0 < malloc.difference - held.live < 8 * MIB, "the reference process has all but the model"
        assert set(INSTRUMENTS) >= {level.instrument for level in sample.residents[0].levels}


def test_memory_outside_torch_is_caught(local: Local) -> None:
    from zerobench.mutants.names import MUTANTS

    mutant = MUTANTS["shadow-outside-torch"]
    case = Case(mutant.name, mutant.reference, "mlp-2m", 1, "bf16")
    records = {}
    for name in devices.SIZES:
        record = local.launch(case.run(name), deadline_s=60)
        records[record.id] = record
    verdict = judge("made", [case], ["memory.device"], records, by="claim")
    finding = next(f for f in verdict.findings if f.check == "memory.device")
    assert finding.status is Status.FAIL, finding.actual
    # Stage 2 at n = 1 holds 16 bytes a parameter; the copy that no tensor shows adds 4.
    assert dict(finding.metrics)["malloc_slope"] == pytest.approx(20, abs=0.4)


@pytest.fixture(scope="module")
def local() -> Any:
    with Local() as local:
        yield local
