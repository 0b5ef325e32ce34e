"""What was given a stand-in says so in every record, finding, table and matrix; and the stand-in for CUDA leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.implementations import answers
from zerobench.implementations.cuda_stand_in import cuda_on_cpu
from zerobench.implementations.registry import BadPlugin
from zerobench.judge import judge
from zerobench.launch.local import Local
from zerobench.libraries import libraries
from zerobench.record import Record
from zerobench.report.matrix import Matrix, versions
from zerobench.report.matrix_html import html_page
from zerobench.report.matrix_markdown import markdown_lines
from zerobench.report.terminal import verdict_lines
from zerobench.tests.made import record
from zerobench.tests.test_matrix import ABOUT

PLUGIN = Path(__file__).parent / "plugins" / "posing.py"
WHAT = "a clock that stands still"


def posing(name: str) -> Case:
    return Case(name.lower(), f"{PLUGIN}:{name}", "mlp-tiny", 2, "bf16")


def test_a_rank_says_it_whatever_comes_of_the_run() -> None:
    with Local() as local:
        for name, status, said in (("Posing", "ok", (WHAT,)), ("Falling", "error", (WHAT,)), ("Absent", "skip", ())):
            made = local.launch(posing(name).run("plain"), deadline_s=60)
            assert (made.status, made.shimmed) == (status, said), made.reason
            assert made.libraries == ((f"msgspec {version('msgspec')}",) if said else ())
            assert Record.from_json(made.to_json()) == made


def test_findings_tables_and_the_matrix_say_it() -> None:
    case = replace(posing("Posing"), world_size=4)
    made = record(case=case, change=lambda s: replace(s, shimmed=(WHAT,)))
    verdict = judge("made", [case], ["memory.at_rest", "traffic.volume"], {made.id: made})
    judged = [f for f in verdict.findings if f.status is Status.PASS]
    assert len(judged) == 3
    assert all(f.actual.endswith("; shimmed") and f"shimmed: {WHAT}" in f.detail for f in judged)
    told = "\n".join(verdict_lines(verdict, [case], {made.id: made}, False))
    assert "pass, shimmed" in told and f"posing is shimmed, no verdict on its library: {WHAT}" in told
    matrix = Matrix()
    matrix.add(
        ABOUT, [case], verdict.findings, [replace(made, samples=(replace(made.samples[0], libraries=("a 1",)),))]
    )
    matrix.add(ABOUT, [case], verdict.findings)  # of the same making: said once
    assert matrix.made_with() == [versions(ABOUT), "a 1: posing"]
    for text in ("\n".join(markdown_lines(matrix)), html_page(matrix)):
        assert "posing (shimmed)" in text and "a 1: posing" in text and f"no verdict on its library: {WHAT}" in text


def test_a_library_is_found_by_its_module_and_what_every_result_names_is_left_out() -> None:
    assert libraries(["zerobench.cli", "torch.nn", "json", "ruamel.none", "pytest_benchmark.plugin", "", "pytest"]) == (
        f"pytest-benchmark {version('pytest-benchmark')}",
        f"pytest {version('pytest')}",
    )


def test_what_is_no_text_is_refused() -> None:
    assert answers.shim(None) is None and answers.shim(WHAT) == WHAT
    for wrong in ("", " ", True, 1, ("a",)):
        with pytest.raises(BadPlugin, match=r"shimmed is .*; it says as text"):
            answers.shim(wrong)


def test_cuda_stands_in_for_as_long_as_it_is_asked() -> None:
    before = dict(vars(torch.cuda))
    tensor = torch.zeros(2)
    with cuda_on_cpu():
        assert torch.cuda.is_available() and torch.cuda.current_stream() == torch.cuda.Stream()
        assert tensor.is_cuda and tensor.type() == "torch.cuda.FloatTensor" and tensor.cuda() is tensor
        made = [
            torch.zeros(1, device="cuda"),
            torch.tensor([1], device=torch.cuda.current_device()),
            tensor.to("cuda:0"),
        ]
        assert {t.device.type for t in made} == {"cpu"}
        assert tensor.to(torch.float16).dtype is torch.float16
        assert tensor.cpu().data_ptr() != tensor.data_ptr()  # a copy, as from a GPU
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.record_stream(torch.cuda.current_stream())
        with pytest.raises(RuntimeError), cuda_on_cpu():
            torch.zeros(2) @ torch.zeros(3)
    assert dict(vars(torch.cuda)) == before
    assert Tensor.record_stream is torch._C.TensorBase.record_stream
    assert not tensor.is_cuda and tensor.type() == "torch.FloatTensor"
