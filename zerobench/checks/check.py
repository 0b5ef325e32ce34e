"""What a check is: one row of the specification, and a pure function from records to a judgement.

A check sees a `View` (the case, its records by scenario, and what was claimed) and says `Judgement`s with two verdicts.
It never sees torch, the implementation, or another check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerobench.case import Case
from zerobench.claims import Claims, Recipe
from zerobench.finding import Level, Status
from zerobench.record import Call, Holding, ModelFacts, Record, Sample
from zerobench.scenarios import SCENARIOS
from zerobench.terms import DTYPE_NBYTES, Collective, Moment, Stage
from zerobench.units import nbytes_text


class NotApplicable(Exception):
    """Raised by a check that has nothing to say about this case, with the reason: a skip."""


class Unreliable(Exception):
    """Raised by a check whose instrument and witness disagree, with both readings: invalid, neither pass nor fail."""


@dataclass(frozen=True)
class Judgement:
    """Both verdicts and what they rest on. ranks: where it does not hold; empty for all or none."""

    claim: Status
    paper: Status
    expected: str
    actual: str
    ranks: tuple[int, ...] = ()
    detail: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class View:
    """What a check may look at. `record` is the run of the check's first scenario, `records` all of them by scenario;
    `family` the same scenario's records of this case at every world size."""

    case: Case
    records: Mapping[str, Record]
    family: tuple[Record, ...] = ()
    record: Record | None = None

    @property
    def main(self) -> Record:
        assert self.record is not None
        return self.record

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.main.samples

    @property
    def claims(self) -> Claims:
        assert self.main.claims is not None
        return self.main.claims

    @property
    def model(self) -> ModelFacts:
        assert self.main.model is not None
        return self.main.model

    @property
    def psi(self) -> int:
        return self.model.psi

    @property
    def n(self) -> int:
        return self.main.run.case.world_size

    @property
    def stage(self) -> Stage:
        return self.claims.stage

    @property
    def recipe(self) -> Recipe:
        """The claimed dtypes."""
        return self.claims.recipe or self.paper_recipe

    @property
    def paper_recipe(self) -> Recipe:
        """The paper's dtypes at this precision."""
        return Recipe.of(self.case.precision)

    @property
    def moments(self) -> int:
        return SCENARIOS[self.main.run.scenario].optimizer.moments

    @property
    def last_step(self) -> int:
        case = self.main.run.case
        return case.warmup + case.measured - 1

    @property
    def measured_steps(self) -> range:
        case = self.main.run.case
        return range(case.warmup, case.warmup + case.measured)

    def bucket_numel(self, record: Record | None = None) -> int:
        """Elements of the largest buffer that gradients may be gathered in: what the scenario asked for, where that is
        honoured, or the largest unit; never less than the largest parameter, which no bucket can split here."""
        model = (record or self.main).model
        assert model is not None
        largest = max(model.parameters.values(), default=0)
        if "bucket" in self.claims.supports and model.bucket_numel:
            return max(model.bucket_numel, largest)
        return max([*model.units, largest])

    def padding_total(self) -> int:
        """Elements of padding that a whole tensor may travel with: what is claimed of one rank's part, for every
        rank."""
        return self.n * self.claims.padding_numel

    def padding_cap(self) -> int:
        """The most padding that a claim may ask for, in elements a rank and category: the suite's cap.

        Rounding every parameter up to a multiple of n costs at most (n-1) a parameter; rounding up rows of matrices
        costs up to n-1 rows each, which on small models comes to a few hundredths of Psi. More is a buffer by another
        name.
        """
        return max((self.n - 1) * max(len(self.model.parameters), 1), self.psi // 20)


@dataclass(frozen=True)
class Check:
    """One row. kind: "==" exact, "<=" bound, "within" noise, "" for none. scenarios: the runs it reads, the first its
    main one. also: runs that it reads where the implementation supports what they need, and does without elsewhere.
    over: "case", or "family" for one word about all world sizes. simulated: whether it can judge a run of tensors
    without memory: "ranks" by the ranks that ran, "world" if all did, "" not at all."""

    id: str
    level: Level
    kind: str
    requirement: str
    formula: str
    scenarios: tuple[str, ...]
    judge: Callable[[View], Judgement]
    over: str = "case"
    also: tuple[str, ...] = ()
    simulated: str = ""


def verdict(holds: bool) -> Status:
    return Status.PASS if holds else Status.FAIL


def holding(sample: Sample, step: int, moment: Moment) -> Holding:
    """The holding of a sample at (step, moment). Raises NotApplicable where the run was not watched."""
    for candidate in sample.holdings:
        if candidate.step == step and candidate.moment is moment:
            return candidate
    raise NotApplicable(f"memory was not watched at {moment.name} of step {step}")


def payload(calls: Iterable[Call], steps: Iterable[int], model: ModelFacts) -> list[Call]:
    """The subject's own collectives in `steps` that carry gradients or weights; control traffic left out."""
    wanted = set(steps)
    return [c for c in calls if c.step in wanted and c.phase in SUBJECT_PHASES and not is_control(c, model)]


def is_control(call: Call, model: ModelFacts) -> bool:
    """Whether a collective is control traffic: one element (a norm, an overflow flag), a barrier, or a few whole
    numbers.

    Whole numbers are indices and sizes, as when DDP tells the ranks its bucket order after the first step, or DeepSpeed
    compares the order in which forward and backward use parameters: at most four for each parameter tensor. Longer
    ones could be quantised gradients, and count.
    """
    if call.numel <= 1 or call.kind is Collective.BARRIER:
        return True
    whole = call.dtype.startswith(("int", "uint", "bool"))
    return whole and call.numel <= 4 * (len(model.parameters) + 1)


SUBJECT_PHASES = frozenset({"forward", "backward", "step"})


def itemsize(dtype: str) -> int:
    return DTYPE_NBYTES[dtype]


def per_psi(nbytes: Fraction | int | float, psi: int) -> str:
    """Bytes or elements as a multiple of Psi: "2.00 Psi"."""
    return f"{float(nbytes) / psi:.2f} Psi"


def ranks_text(ranks: Iterable[int], n: int) -> str:
    """ "each rank", "rank 1", "ranks 0-2", "ranks 0,2"."""
    listed = sorted(set(ranks))
    if not listed or len(listed) == n:
        return "each rank" if n > 1 else "rank 0"
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if listed == list(range(listed[0], listed[-1] + 1)):
        return f"ranks {listed[0]}-{listed[-1]}"
    return f"ranks {','.join(map(str, listed))}"


def signed(nbytes: Fraction | int) -> str:
    """ "+510 kB", "-8 B"."""
    return f"{'-' if nbytes < 0 else '+'}{nbytes_text(abs(Fraction(nbytes)))}"
