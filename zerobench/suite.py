"""Suite: which implementations, models and worlds to run, and what to check. From YAML to cases.

A suite is read strictly: `load` says all that is wrong at once, each at its line and column. pydantic judges the shape
(keys, types, ranges); `coherence` judges what the parts say to each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, TypeAdapter, ValidationError

from zerobench.case import Case
from zerobench.coherence import AXES, MAX_CASES, Known, cells, implementation_name, mistakes, same_names
from zerobench.loader import BadFile, Document, Loc, Problem, did_you_mean, read
from zerobench.shape import (
    MAX_WORLD_SIZE,
    PATTERNS,
    CheckId,
    Exclude,
    Matrix,
    Name,
    Option,
    OptionName,
    Reference,
    Some,
    Steps,
    Strict,
    Xfail,
)
from zerobench.shipped import find, names

__all__ = [
    "Exclude",
    "Known",
    "Matrix",
    "Steps",
    "Suite",
    "Xfail",
    "find",
    "implementation_name",
    "json_schema",
    "load",
    "load_xfails",
    "names",
    "select_ids",
]

T = TypeVar("T")


class Suite(Strict):
    """A benchmark or conformance suite, as its file says it. `path` and `digest` say which file that was."""

    version: Annotated[int, Field(ge=1, le=1)]
    suite: Name
    about: str = Field("", max_length=1000)
    launch: Literal["local", "torchrun", "simulate"] = "local"
    device: Literal["cpu", "cuda", "shared-gpu"] = Field(
        "cpu", description="cuda: a GPU for each rank; shared-gpu: ranks share GPUs where there are fewer of them"
    )
    judge: Literal["paper", "claim"] = "paper"
    steps: Steps = Steps()
    deadline_s: float | None = Field(None, gt=0, description="Seconds that one case may take")
    matrix: Matrix
    exclude: tuple[Exclude, ...] = ()
    checks: Some[CheckId]
    xfail: tuple[Xfail, ...] = ()
    options: Mapping[Reference, Mapping[OptionName, Option]] = Field(
        default={}, description="Options by implementation, as it stands in the matrix"
    )

    _path: str = PrivateAttr("")
    _digest: str = PrivateAttr("")

    @property
    def path(self) -> str:
        return self._path

    @property
    def digest(self) -> str:
        """sha256 of the file's text, in hexadecimal."""
        return self._digest

    def cases(
        self,
        implementations: Sequence[str] | None = None,
        world_sizes: Sequence[int] | None = None,
        select: str | None = None,
    ) -> tuple[Case, ...]:
        """The matrix less what is excluded, in the order of AXES (n varies fastest).

        implementations and world_sizes stand in for the suite's own. select: see `select_ids`; a case stays if one of
        its findings does. Raises ValueError for an empty or impossible override, for two implementations of one name, and
        for more than MAX_CASES cases.
        """
        axes: dict[str, tuple[Any, ...]] = {axis: getattr(self.matrix, axis) for axis in AXES}
        if implementations is not None:
            axes["implementation"] = tuple(dict.fromkeys(implementations))
            for _, problem in same_names(implementations):
                raise ValueError(f"{problem}: give one class another name, or run them apart")
        if world_sizes is not None:
            axes["world_size"] = tuple(dict.fromkeys(world_sizes))
            if bad := [n for n in world_sizes if isinstance(n, bool) or not 1 <= n <= MAX_WORLD_SIZE]:
                raise ValueError(f"world size {bad[0]!r}: from 1 to {MAX_WORLD_SIZE}")
        numel = 1
        for axis, values in axes.items():
            if not values:
                raise ValueError(f"no value is left for {axis}: give at least one")
            numel *= len(values)
        if numel > MAX_CASES:
            raise ValueError(f"{numel:,} cases; at most {MAX_CASES:,}: split the suite, or name fewer values")
        excluded = {cell for entry in dict.fromkeys(self.exclude) for cell in cells(axes, entry.picks())}
        cases = tuple(self._case(*cell) for cell in itertools.product(*axes.values()) if cell not in excluded)
        if select is None:
            return cases
        kept = select_ids(select, (f"{self.suite}::{case.id}::{check}" for case in cases for check in self.checks))
        return tuple(c for c in cases if any(f"{self.suite}::{c.id}::{check}" in kept for check in self.checks))

    def selected_checks(self, cases: Sequence[Case], select: str | None) -> tuple[str, ...]:
        """The checks of which `select` means a finding on one of `cases`; all of them for None."""
        if select is None:
            return self.checks
        kept = select_ids(select, (f"{self.suite}::{case.id}::{check}" for case in cases for check in self.checks))
        return tuple(check for check in self.checks if any(f"{self.suite}::{c.id}::{check}" in kept for c in cases))

    def _case(self, reference: str, model: str, precision: str, micro_batches: int, world_size: int) -> Case:
        name = implementation_name(reference)
        return Case(
            implementation=name,
            reference=reference,
            model=model,
            world_size=world_size,
            precision=precision,
            micro_batches=micro_batches,
            warmup=self.steps.warmup,
            measured=self.steps.measured,
            device=self.device,
            launch=self.launch,
            options=dict(self.options.get(reference) or self.options.get(name) or {}),
        )

    def xfail_reason(self, case: Case, check: str) -> str | None:
        """Why `check` is known to fail on `case`; None where it is not."""
        return next((x.reason for x in self.xfail if x.check == check and x.matches(case)), None)


def select_ids(select: str, ids: Iterable[str]) -> set[str]:
    """Those of the finding ids `suite::case::check` that `select` means.

    Whole parts ("zero2/gpt-tiny/n4/bf16", "smoke::zero2/gpt-tiny/n4/bf16", "memory.at_rest", the printed id) where any
    id has them; else a shell pattern on the whole id where it has one of *?[ ; else any text that is within the id.
    Exact first, so that n1 does not mean n16 as well.
    """
    ids = list(ids)
    if exact := {i for i in ids if f"::{select}::" in f"::{i}::"}:
        return exact
    if any(c in select for c in "*?["):
        return {i for i in ids if fnmatchcase(i, select)}
    return {i for i in ids if select in i}


def load(path: str | Path, known: Known | None = None) -> Suite:
    """The suite in a file. known: names that exist; what is None is not judged. Raises BadFile with every mistake."""
    document = read(path)
    suite, problems = _shaped(document, Suite)
    told = {p.path for p in problems}
    incoherent = [document.problem(*mistake) for mistake in mistakes(document.data, known)]
    problems += [p for p in incoherent if p.path not in told]
    if problems or suite is None:
        raise BadFile(problems, document.file)
    suite._path = document.file
    suite._digest = hashlib.sha256(document.text.encode()).hexdigest()
    return suite


def load_xfails(path: str | Path) -> tuple[Xfail, ...]:
    """The excuses in a file of their own: a list, each entry as under `xfail` in a suite. Raises BadFile."""
    document = read(path)
    xfails, problems = _shaped(document, tuple[Xfail, ...])
    if problems or xfails is None:
        raise BadFile(problems, document.file)
    return xfails


def _shaped(document: Document, kind: type[T]) -> tuple[T | None, list[Problem]]:
    try:
        # through JSON, because pydantic's strict mode takes a list for a tuple only there
        return TypeAdapter(kind).validate_json(json.dumps(document.data)), []
    except ValidationError as error:
        problems = []
        for e in error.errors(include_url=False):
            loc = tuple(part for part in e["loc"] if part != "[key]")
            if e["type"] == "too_short" and e["input"]:
                continue  # pydantic counts only the good items; the bad ones are told of themselves
            problems.append(document.problem(loc, _said(e, loc)))
        return None, problems


def _said(error: Any, loc: Loc) -> str:
    """pydantic's error in words, with what was found and the nearest spelling of what was meant."""
    kind, found = error["type"], error["input"]
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        parents: dict[Any, type[BaseModel]] = {"steps": Steps, "matrix": Matrix, "exclude": Exclude}
        parent = parents.get(loc[0], Xfail) if len(loc) > 1 else Suite
        return "unknown key" + did_you_mean(loc[-1], parent.model_fields)
    what = {"tuple_type": "should be a list", "too_short": "should not be empty"}.get(kind, error["msg"])
    what = PATTERNS.get(error.get("ctx", {}).get("pattern"), what)
    what = what.removeprefix("Value error, ").replace("Input should", "should").replace("String should", "should")
    shown = json.dumps(found, default=str)
    hint = did_you_mean(found, re.findall(r"'([^']*)'", what)) if kind == "literal_error" else ""
    return f"{what}, not {shown if len(shown) <= 60 else shown[:57] + '...'}{hint}"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a suite file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Suite.model_json_schema()}
