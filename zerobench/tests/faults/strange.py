"""A correct stage 2, one method of which answers what the plug-in API rules out; which and what, its options say.

--option method=step --option answer=None. Runs in ranks. `ANSWERS` has, for each method, each answer and what must be
said of it: a regular expression that the record's reason matches, or the id of a check that fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import torch

from zerobench.claims import Claims, Recipe
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero2
from zerobench.terms import Category, Stage

Make = Callable[[Any], Any]
"""From the right answer to the strange one."""


class Raising:
    """Raises, whatever it is asked."""

    def _no(self, *_: object) -> Any:
        raise ZeroDivisionError("asked")

    __repr__ = __str__ = __eq__ = __bool__ = __len__ = __iter__ = __float__ = __hash__ = _no  # type: ignore[assignment]


class Disguised:
    """Says that it is a Claims, a Tensor, whatever `isinstance` wants to hear."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.kind


class Fickle(Claims):
    """Another stage each time that it is asked, and never a problem."""

    def __getattribute__(self, name: str) -> Any:
        if name == "stage":
            object.__setattr__(self, "asked", self.__dict__.get("asked", 0) + 1)
            return Stage(self.__dict__["asked"] % 4)
        return object.__getattribute__(self, name)

    def problems(self) -> list[str]:
        return []


class Endless(dict[str, Any]):
    """Has no last item."""

    def items(self) -> Any:
        return ((f"weight{i}", torch.zeros(())) for i in itertools.count())

    def keys(self) -> Any:
        return (f"weight{i}" for i in itertools.count())

    def __iter__(self) -> Any:
        return iter(self.keys())


@dataclass(frozen=True)
class Boastful(StepReport):
    """A StepReport whose fields are objects that raise."""

    skipped: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "skipped", Raising())


HOSTILE_NAMES = (
    "../../etc/passwd",
    "a\"b'c",
    "a\nb",
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "\u202eabc",
    "🙂",
    "a|b`c",
)
NONE: tuple[str, Make] = ("None", lambda _: None)
RAISING: tuple[str, Make] = ("an object that raises", lambda _: Raising())


def _with(category: Category, value: Make) -> Make:
    return lambda right: {**right, category: value(right[category])}


def _renamed(right: Mapping[str, Any]) -> dict[str, Any]:
    return {name + HOSTILE_NAMES[i % len(HOSTILE_NAMES)]: tensor for i, (name, tensor) in enumerate(right.items())}


def _largest(right: Mapping[str, Any], value: Make) -> dict[str, Any]:
    name = max(right, key=lambda name: right[name].numel())
    return {**right, name: value(right[name])}


MAPPING = r"returned .*; it returns a mapping from names to tensors"
NAMED: tuple[tuple[str, Make, str], ...] = (
    (*NONE, MAPPING),
    (*RAISING, MAPPING),
    ("a list", list, MAPPING),
    ("numbers as names", lambda right: dict(enumerate(right.values())), "the key an int 0"),
    ("None for a tensor", lambda right: _largest(right, lambda _: None), "None as '.*'; it returns tensors"),
    ("numbers for a tensor", lambda right: _largest(right, lambda t: t.tolist()), "a list .* as '"),
    ("a meta tensor", lambda right: _largest(right, lambda t: t.to("meta")), "a meta tensor, which has no memory"),
    ("a disguised tensor", lambda right: _largest(right, lambda _: Disguised(torch.Tensor)), "a Disguised"),
    ("nothing", lambda _: {}, "numerics.gradient"),
    ("one too few", lambda right: dict(list(right.items())[1:]), "numerics.gradient"),
    ("one too many", lambda right: {**right, "more": torch.zeros(3)}, "numerics.gradient"),
    ("hostile names", _renamed, "numerics.gradient"),
    ("another shape", lambda right: _largest(right, lambda t: t.reshape(1, 1, -1)), "numerics.gradient"),
    ("another size", lambda right: _largest(right, lambda t: t.reshape(-1).repeat(2)), "numerics.gradient"),
    ("whole numbers", lambda right: _largest(right, lambda t: t.long()), "returned torch.int64 as '.*floating-point"),
    (
        "complex numbers",
        lambda right: _largest(right, lambda t: t + 1j),
        "returned torch.complex64 as '.*floating-point",
    ),
    ("not a number", lambda right: _largest(right, lambda t: t * math.nan), "numerics.gradient"),
    (
        "a million of one element",
        lambda right: {**right, **{f"m{i}": torch.zeros(1) for i in range(10**6)}},
        "ran out of its 700 MB|hung",
    ),
    ("without end", lambda _: Endless(), "hung|ran out of its"),
)
LOSS = "it returns the micro-batch's mean loss"
STATES = "it returns a mapping from zerobench.Category to sequences of tensors"
REPORT = "returned .*it returns (a zerobench.StepReport|True or False|a number or None)"
ANSWERS: dict[str, tuple[tuple[str, Make, str], ...]] = {
    "unavailable": (
        ("False", lambda _: False, "unavailable\\(\\) returned a bool False"),
        ("an object that raises", lambda _: Raising(), "unavailable\\(\\) returned a Raising"),
        ("a list", lambda _: ["no"], "unavailable\\(\\) returned a list"),
        ("hostile text", lambda _: "\n".join(HOSTILE_NAMES), "unavailable: "),
    ),
    "claims": (
        (*NONE, "claims\\(\\) returned None"),
        (*RAISING, "claims\\(\\) returned a Raising"),
        ("a dict", lambda _: {"stage": 2}, "claims\\(\\) returned a dict"),
        ("a disguise", lambda _: Disguised(Claims), "claims\\(\\) returned a Disguised"),
        ("stage 7", lambda right: replace(right, stage=7), "Claims.stage must be"),
        (
            "a raising stage",
            lambda right: replace(right, stage=Raising()),
            "Claims.stage must be a Stage, not a Raising",
        ),
        ("raising padding", lambda right: replace(right, padding_numel=Raising()), "cannot be read: ZeroDivisionError"),
        ("a list of features", lambda right: replace(right, supports=["clipping"]), "Claims.supports must be"),
        ("features that are none", lambda right: replace(right, supports=frozenset({"<b>"})), "unknown features"),
        ("endless padding", lambda right: replace(right, padding_numel=math.inf), "Claims.padding_numel must be"),
        ("a shard size of True", lambda right: replace(right, shard_size=True), "Claims.shard_size must be"),
        ("a volume that is code", lambda right: replace(right, volume="__import__('os')"), "Claims.volume|volume"),
        ("a recipe in disguise", lambda right: replace(right, recipe=Disguised(Recipe)), "Claims.recipe must be"),
        ("a fickle subclass", lambda right: Fickle(right.stage, supports=right.supports), "memory.at_rest"),
    ),
    "build": (
        (*NONE, "NoneType lacks forward\\(\\)"),
        (*RAISING, "Raising lacks forward\\(\\)"),
        ("its class", type, "cannot be called as"),
        ("a generator", lambda right: (x for x in [right]), "generator lacks forward"),
    ),
    "forward": (
        (*NONE, "returned None; it returns the loss, a tensor of one element"),
        (*RAISING, "a Raising .*it returns the loss"),
        ("a number", lambda right: float(right.detach()), "a float .*it returns the loss, a tensor of one element"),
        ("a tuple", lambda right: (right,), "a tuple .*it returns the loss"),
        ("a vector", lambda right: right.repeat(3), LOSS),
        ("no element", lambda right: right.reshape(1)[:0], LOSS),
        ("whole numbers", lambda right: right.long(), LOSS),
        ("a complex number", lambda right: right + 1j, LOSS),
        ("a meta tensor", lambda right: right.to("meta"), LOSS),
        ("without a graph", lambda right: right.detach(), "does not require grad"),
        ("not a number", lambda right: right * math.nan, "numerics.gradient"),
        ("infinity", lambda right: right * math.inf, "numerics.gradient"),
    ),
    "step": (
        (*NONE, REPORT),
        (*RAISING, REPORT),
        ("True", lambda _: True, REPORT),
        ("a dict", lambda _: {"skipped": False}, REPORT),
        ("a disguise", lambda _: Disguised(StepReport), REPORT),
        ("fields that raise", lambda _: Boastful(), REPORT),
        ("skipped as text", lambda _: StepReport(skipped="no"), REPORT),  # type: ignore[arg-type]
        ("a vector as norm", lambda _: StepReport(grad_norm=torch.ones(3)), REPORT),  # type: ignore[arg-type]
        ("a complex norm", lambda _: StepReport(grad_norm=torch.ones(()) + 1j), REPORT),  # type: ignore[arg-type]
        ("text as scale", lambda _: StepReport(loss_scale="dynamic"), REPORT),  # type: ignore[arg-type]
        ("always skipped", lambda right: replace(right, skipped=True), "numerics.overflow"),
    ),
    "model_states": (
        (*NONE, STATES),
        (*RAISING, STATES),
        ("a list", lambda right: [t for tensors in right.values() for t in tensors], STATES),
        ("text as keys", lambda right: {c.value: t for c, t in right.items()}, "the key a str '.*; " + STATES),
        ("None for a category", _with(Category.GRADIENT, lambda _: None), STATES),
        ("a tensor for a category", _with(Category.GRADIENT, lambda right: right[0]), "a Tensor .* for gradient"),
        ("a generator", _with(Category.GRADIENT, iter), "for gradient; " + STATES),
        ("text for a category", _with(Category.OPTIMIZER, lambda _: "adam"), "a str 'adam' for optimizer"),
        ("None among tensors", _with(Category.PARAMETER, lambda right: [*right, None]), "None as parameter\\["),
        (
            "sizes for tensors",
            _with(Category.PARAMETER, lambda right: [t.numel() for t in right]),
            "an int .* as param",
        ),
        ("meta tensors", _with(Category.OPTIMIZER, lambda right: [t.to("meta") for t in right]), "a meta tensor"),
        ("nothing", lambda _: {}, "memory.unclaimed"),
        ("strangers' memory", _with(Category.OPTIMIZER, lambda right: [*right, torch.zeros(10**5)]), "memory.at_rest"),
        (
            "a million of one element",
            _with(Category.OPTIMIZER, lambda right: [*right, *torch.zeros(10**6, 1)]),
            "ran out of its 700 MB|hung",
        ),
    ),
    "full_parameters": tuple(
        (name, make, says.replace("numerics.gradient", "numerics.update")) for name, make, says in NAMED
    ),
    "full_gradients": NAMED,
}


class Strange(Zero2):
    name = "strange"

    def claims(self, job: Job) -> Claims:
        right = super().claims(job)
        return self._answer(job, "claims", right)  # type: ignore[no-any-return]

    def build(self, job: Job) -> Any:
        job.options["method"], job.options["answer"]  # an option that build never reads is an error
        engine = super().build(job)
        for method in ("forward", "step", "model_states", "full_parameters", "full_gradients"):
            self._replace(job, engine, method)
        return self._answer(job, "build", engine)

    def _answer(self, job: Job, method: str, right: Any) -> Any:
        if job.options.get("method") != method:
            return right
        return made(method, str(job.options.get("answer")))(right)

    def _replace(self, job: Job, engine: Any, method: str) -> None:
        own = getattr(engine, method)
        setattr(engine, method, lambda *args, **kwargs: self._answer(job, method, own(*args, **kwargs)))


class _Unsure(Zero2):
    """One that answers `unavailable`, which sees no job, strangely."""

    name = "unsure"
    answer = ""

    def unavailable(self) -> Any:
        return made("unavailable", self.answer)(None)


class UnsureFalse(_Unsure):
    answer = "False"


class UnsureRaising(_Unsure):
    answer = "an object that raises"


class UnsureList(_Unsure):
    answer = "a list"


class UnsureText(_Unsure):
    answer = "hostile text"


UNSURE = {kind.answer: kind.__name__ for kind in (UnsureFalse, UnsureRaising, UnsureList, UnsureText)}


def made(method: str, answer: str) -> Make:
    return next(make for name, make, _ in ANSWERS[method] if name == answer)


class Meddler(Zero2):
    """Changes the job that it was given, as far as it lets itself be changed."""

    name = "meddler"

    def build(self, job: Job) -> Any:
        engine = super().build(job)
        job.options.get("method"), job.options.get("answer")
        try:
            job.micro_batches = 7  # type: ignore[misc]
        except FrozenInstanceError:
            object.__setattr__(job, "micro_batches", 7)
        object.__setattr__(job, "precision", "fp8")
        object.__setattr__(job, "features", None)
        return engine
