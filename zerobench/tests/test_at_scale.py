"""The accepted bytes of the suite at-scale, against the formulas exactly and against what the ZeRO paper prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerobench.analytic import total
from zerobench.baseline import ByteBaseline
from zerobench.claims import Recipe
from zerobench.suite import find, load
from zerobench.terms import MODEL_STATES, Stage
from zerobench.tests.benchmarks.table_1 import COLUMNS, numbers

FILE = Path(__file__).parent.parent.parent / "baselines" / "bytes" / "at-scale.json"
STAGES = dict(zip(COLUMNS.values(), Stage, strict=True))

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="the baselines are in the checkout only")


@pytest.fixture(scope="module")
def held() -> dict[str, list[int]]:
    """Bytes of model states by run, of each rank that ran."""
    runs = ByteBaseline.load(FILE).runs
    return {
        name: [sum(row) for row in zip(*(run.nbytes[c.value] for c in MODEL_STATES), strict=True)]
        for name, run in runs.items()
    }


def test_every_case_of_the_suite_was_executed_and_holds_what_the_formula_says(held: dict[str, list[int]]) -> None:
    psi = {name: run.psi for name, run in ByteBaseline.load(FILE).runs.items()}
    cases = load(find("at-scale")).cases()
    assert {case.run("plain").id for case in cases} == set(held)
    for case in cases:
        name, n = case.run("plain").id, case.world_size
        law = total(Recipe.of("fp16"), STAGES[case.implementation], psi[name], n)
        assert held[name] == [law] * min(n, 4 if n <= 4 else 2), name


def test_every_number_of_table_1_and_figure_1_is_met(held: dict[str, list[int]]) -> None:
    found = list(numbers())
    assert len(found) == 3 * 6 * 3 + 4
    for number in found:
        assert all(number.agrees(nbytes) for nbytes in held[number.run_id]), number
