"""What a plug-in answers, looked at before anything is done with it: wrong types are refused by the method's name.

Names, shapes and values of tensors are for the checks to judge; here a thing is only made sure to be what the plug-in
API says it is, so that no error of ours speaks in its place. Plain copies are handed on: an object that answers
otherwise the second time it is asked is asked once.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from zerobench.analytic import evaluate_volume
from zerobench.claims import Claims, Recipe
from zerobench.implementations.protocol import StepReport
from zerobench.implementations.registry import BadPlugin
from zerobench.terms import Category, Stage


def claimed(answer: Any) -> Claims:
    """A plain `Claims` of what `claims()` returned. Raises BadPlugin unless it can be judged."""
    if not issubclass(type(answer), Claims):
        raise BadPlugin(f"claims() returned {told(answer)}, not a zerobench.Claims")
    try:
        values = {field.name: getattr(answer, field.name) for field in fields(Claims)}
        for name, kind in (("stage", Stage), ("recipe", Recipe), ("supports", frozenset)):
            if not issubclass(type(values[name]), kind) and not (name == "recipe" and values[name] is None):
                raise BadPlugin(f"Claims.{name} must be a {kind.__name__}, not {told(values[name])}")
        if values["recipe"] is not None:
            values["recipe"] = Recipe(**{f.name: getattr(values["recipe"], f.name) for f in fields(Recipe)})
        claims = Claims(**values)
        problems = claims.problems()
        if not problems and claims.volume is not None:
            evaluate_volume(claims.volume, 1)
    except BadPlugin:
        raise
    except Exception as error:
        raise BadPlugin(f"claims() returned what cannot be read: {type(error).__name__}: {_text(error)}") from error
    if problems:
        raise BadPlugin("; ".join(problems))
    return claims


def reason(answer: Any) -> str | None:
    """What `unavailable()` returned. Raises BadPlugin unless it is None or text."""
    if answer is not None and not issubclass(type(answer), str):
        raise BadPlugin(f"unavailable() returned {told(answer)}; it returns None, or the reason as text")
    return None if answer is None else str(answer)


def modules(answer: Any) -> tuple[str, ...]:
    """What `imports` holds. Raises BadPlugin unless it is a list or tuple of module names."""
    if not issubclass(type(answer), (list, tuple)) or not all(issubclass(type(name), str) and name for name in answer):
        raise BadPlugin(f"imports is {told(answer)}; it is a tuple of names of modules")
    return tuple(answer)


def shim(answer: Any) -> str | None:
    """What `shimmed` holds. Raises BadPlugin unless it is None or text."""
    if answer is not None and not (issubclass(type(answer), str) and answer.strip()):
        raise BadPlugin(f"shimmed is {told(answer)}; it says as text what a stand-in is used for")
    return None if answer is None else str(answer)


class Answering:
    """An engine whose answers are checked. Everything but the methods below is the engine's own.

    who: the engine's class, for messages. Each method raises BadPlugin for an answer that the plug-in API rules out,
    and lets through what the engine raises.
    """

    def __init__(self, engine: Any) -> None:
        self.bare = engine
        self._who = f"engine {type(engine).__module__}.{type(engine).__qualname__}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        loss = self.bare.forward(batch, last=last)
        if not issubclass(type(loss), Tensor):
            self._refuse("forward", f"{told(loss)}", "the loss, a tensor of one element")
        if loss.numel() != 1 or not loss.is_floating_point() or loss.device.type == "meta":
            what = f"a tensor {tuple(loss.shape)} of {loss.dtype} on {loss.device}"
            self._refuse("forward", what, "the micro-batch's mean loss, one floating-point number")
        return loss  # type: ignore[no-any-return]

    def step(self) -> StepReport:
        report = self.bare.step()
        if not issubclass(type(report), StepReport):
            self._refuse("step", f"{told(report)}", "a zerobench.StepReport")
        return StepReport(
            skipped=self._flag(report.skipped),
            grad_norm=self._number("grad_norm", report.grad_norm),
            loss_scale=self._number("loss_scale", report.loss_scale),
        )

    def model_states(self) -> dict[Category, Sequence[Tensor]]:
        states, method = self.bare.model_states(), "model_states"
        wanted = "a mapping from zerobench.Category to sequences of tensors"
        if not isinstance(states, Mapping):
            self._refuse(method, f"{told(states)}", wanted)
        out: dict[Category, Sequence[Tensor]] = {}
        for category, tensors in states.items():
            if not issubclass(type(category), Category):
                self._refuse(method, f"the key {told(category)}", wanted)
            if not issubclass(type(tensors), Sequence) or issubclass(type(tensors), str):
                self._refuse(method, f"{told(tensors)} for {category.value}", wanted)
            out[category] = tuple(tensors)
            for i, tensor in enumerate(out[category]):
                self._tensor(method, f"{category.value}[{i}]", tensor)
        return out

    def full_parameters(self) -> dict[str, Tensor]:
        return self._named("full_parameters", self.bare.full_parameters())

    def full_gradients(self) -> dict[str, Tensor]:
        return self._named("full_gradients", self.bare.full_gradients())

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        method = "full_optimizer_state"
        states = self._mapping(method, self.bare.full_optimizer_state())
        out = {}
        for parameter, state in states.items():
            out[parameter] = self._mapping(f"{method}()[{parameter!r}]", state)
            for name, tensor in out[parameter].items():
                self._tensor(method, f"{name!r} of {parameter!r}", tensor)
        return out

    def _named(self, method: str, answer: Any) -> dict[str, Tensor]:
        tensors = self._mapping(method, answer)
        for name, tensor in tensors.items():
            self._tensor(method, f"{name!r}", tensor)
            if not tensor.is_floating_point():
                self._refuse(method, f"{tensor.dtype} as {name!r}", "floating-point numbers")
        return tensors

    def _mapping(self, method: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, Mapping):
            self._refuse(method, f"{told(answer)}", "a mapping from names to tensors")
        out = dict(answer)
        for name in out:
            if type(name) is not str:
                self._refuse(method, f"the key {told(name)}", "the module's own names as keys")
        return out

    def _tensor(self, method: str, where: str, tensor: Any) -> None:
        if not issubclass(type(tensor), Tensor):
            self._refuse(method, f"{told(tensor)} as {where}", "tensors")
        if tensor.device.type == "meta":
            self._refuse(method, f"a meta tensor, which has no memory, as {where}", "tensors that hold values")

    def _flag(self, value: Any) -> bool:
        if type(value) is bool or _single(value):
            return bool(value)
        self._refuse("step", f"a StepReport whose skipped is {told(value)}", "True or False")
        raise AssertionError

    def _number(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        if type(value) in (int, float) or _single(value):
            return float(value)
        self._refuse("step", f"a StepReport whose {name} is {told(value)}", "a number or None")
        raise AssertionError

    def _refuse(self, method: str, what: str, wanted: str) -> None:
        raise BadPlugin(f"{self._who}: {method}{'' if '(' in method else '()'} returned {what}; it returns {wanted}")


def _single(value: Any) -> bool:
    """Whether it is one real number of torch's or numpy's."""
    if issubclass(type(value), Tensor):
        return value.numel() == 1 and value.device.type != "meta" and not value.is_complex()
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and value.dtype.kind in "biuf"


class _Short(reprlib.Repr):
    """Tensors by shape: their values are long, and may not be there."""

    def repr1(self, x: Any, level: int) -> str:
        if issubclass(type(x), Tensor):
            return f"tensor{tuple(x.shape)}:{str(x.dtype).removeprefix('torch.')}"
        return super().repr1(x, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: Any) -> str:
    """A value in a few words, whatever its own repr does."""
    try:
        return _SHORT.repr(value)
    except Exception as error:
        return f"(its repr raises {type(error).__name__})"


def told(value: Any) -> str:
    """Its kind and itself: "a list [1, 2]"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name} {shown(value)}"


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as again:
        return f"(its text raises {type(again).__name__})"
