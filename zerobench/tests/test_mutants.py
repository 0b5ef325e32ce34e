"""The table of mutants is whole: every check that can fail has one, every class is there, every report is its own.

That each is killed is `zerobench selftest`'s business, which CI runs.
"""

from __future__ import annotations

import importlib

from zerobench.checks.catalogue import CHECKS
from zerobench.finding import Level
from zerobench.mutants.names import MUTANTS


def test_every_check_that_can_fail_has_a_mutant() -> None:
    can_fail = {check.id for check in CHECKS.values() if check.level is not Level.INFO}
    killed = {killer for mutant in MUTANTS.values() for killer in mutant.killers}
    assert killed <= set(CHECKS)
    assert can_fail - killed == set()


def test_every_mutant_is_a_class_with_its_name() -> None:
    for mutant in MUTANTS.values():
        module, _, kind = mutant.reference.partition(":")
        assert getattr(importlib.import_module(module), kind).name == mutant.name


def test_every_mutant_stands_for_a_report_of_its_own() -> None:
    reports = [mutant.stands_for.split(" (")[0] for mutant in MUTANTS.values()]
    twice = sorted({r for r in reports if reports.count(r) > 1})
    assert not twice, twice
