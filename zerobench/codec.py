"""Dataclasses to and from JSON: what a record is written with.

`decode` is strict about types it is told and lenient about keys it does not know: a reader of this version can read a
later minor version's record. NaN and infinities, which JSON has not, travel as the words "nan", "inf" and "-inf"; a
long run of consecutive whole numbers (a group of a thousand ranks, in each of its calls) as its ends, "0..1023".
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, lru_cache
from sys import intern
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
LONG, MOST = 16, 1 << 20
_ENDS = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def encode(value: Any) -> Any:
    """`value` as what json.dumps(..., allow_nan=False) accepts. Raises TypeError for what has no such form."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k.value if isinstance(k, Enum) else k): encode(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(encode(v) for v in value)
    if isinstance(value, (list, tuple)):
        return _ends(value) or [encode(v) for v in value]
    raise TypeError(f"cannot be written to a record: {type(value).__name__}")


def decode(kind: type[T], data: Any, where: str = "") -> T:
    """The value of type `kind` that `data` stands for. Raises ValueError naming the field that does not fit."""
    try:
        return _decoder(kind)(data)  # type: ignore[no-any-return, arg-type]
    except _Misfit as misfit:
        raise ValueError(f"{where or kind.__name__}{misfit.where}: {misfit.what}") from None


class _Misfit(Exception):
    """what: is wrong; where: the path to it, made from the inside out as the exception passes."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.what, self.where = what, where


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """A function from JSON to `kind`, made once: a results file may have a hundred thousand records of some hundred
    values each, and to ask each time what a type is made of costs ten times what the values cost."""
    origin = get_origin(kind)
    if kind is Any:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return _optional(_decoder(next(a for a in get_args(kind) if a is not type(None))))
    if dataclasses.is_dataclass(kind):
        return _instance(kind)  # type: ignore[arg-type]
    if origin in (tuple, list):
        args = get_args(kind)
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            return _fixed([_decoder(a) for a in args])
        return _sequence(origin, _decoder(args[0]), plain=args[0])
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping(*get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return _scalar(kind)


def _optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda data: None if data is None else inner(data)


def _instance(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    table = {f.name: (_exact(hints[f.name]), _decoder(hints[f.name])) for f in fields}
    fixed = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    made = {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}
    required = table.keys() - fixed.keys() - made.keys()
    plain = not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__")

    def instance(data: Any) -> Any:
        if type(data) is not dict and not isinstance(data, Mapping):
            raise _Misfit(f"expected an object, got {type(data).__name__}")
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, value in data.items():
                if (row := table.get(name)) is not None:
                    exact, inner = row
                    if type(value) is not exact:
                        values[name] = inner(value)
                    else:  # a hundred thousand records say "bf16": once in memory is enough
                        values[name] = intern(value) if isinstance(value, str) else value
        except _Misfit as misfit:
            misfit.where = f".{name}{misfit.where}"
            raise
        if missing := required - values.keys():
            raise _Misfit(f"{', '.join(sorted(missing))} is missing")
        if not plain:
            try:
                return kind(**values)
            except TypeError as error:
                raise _Misfit(str(error)) from None
        found: Any = object.__new__(kind)
        # What a frozen dataclass's own __init__ does, field by field, at several times the cost.
        own = found.__dict__
        own.update(fixed)
        for name, factory in made.items():
            own[name] = factory()
        own.update(values)
        return found

    return instance


def _exact(kind: Any) -> type | None:
    """The type whose values stand for themselves, where there is one."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(a for a in get_args(kind) if a is not type(None))
    return kind if kind in (str, int, float, bool) else None


def _fixed(inner: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def fixed(data: Any) -> Any:
        if not isinstance(data, list):
            raise _Misfit(f"expected a list, got {type(data).__name__}")
        if len(inner) != len(data):
            raise _Misfit(f"expected {len(inner)} items, got {len(data)}")
        return tuple(_item(decoder, i, value) for i, (decoder, value) in enumerate(zip(inner, data, strict=True)))

    return fixed


def _sequence(origin: type, inner: Callable[[Any], Any], *, plain: Any) -> Callable[[Any], Any]:
    """plain: the type of the items, where they stand for themselves."""
    exact, runs = {_exact(plain)} - {None, str}, plain is int

    def sequence(data: Any) -> Any:
        if not isinstance(data, list):
            if runs and isinstance(data, str) and (ends := _ENDS.fullmatch(data)):
                return origin(_run(int(ends[1]), int(ends[2])))
            raise _Misfit(f"expected a list, got {type(data).__name__}")
        if exact and set(map(type, data)) <= exact:
            return origin(data)
        try:
            return origin([inner(value) for value in data]) if data else origin()
        except _Misfit:
            for i, value in enumerate(data):  # again, to say which
                _item(inner, i, value)
            raise

    return sequence


def _ends(value: list[Any] | tuple[Any, ...]) -> str | None:
    """The ends of a run that is long enough to be shortened; None for anything else."""
    if len(value) < LONG or type(value[0]) is not int or value[0] < 0:
        return None
    first, last = value[0], value[0] + len(value) - 1
    return f"{first}..{last}" if tuple(value) == _run(first, last) else None


@lru_cache(maxsize=64)
def _run(first: int, last: int) -> tuple[int, ...]:
    if not 0 <= last - first < MOST:
        raise _Misfit(f"{first}..{last} is not a run of at most {MOST} whole numbers")
    return tuple(range(first, last + 1))


def _item(inner: Callable[[Any], Any], i: int, value: Any) -> Any:
    try:
        return inner(value)
    except _Misfit as misfit:
        misfit.where = f"[{i}]{misfit.where}"
        raise


def _mapping(key: Any, value: Any) -> Callable[[Any], Any]:
    inner = _decoder(value)
    whole = isinstance(key, type) and issubclass(key, (Enum, int))

    def mapping(data: Any) -> Any:
        if type(data) is not dict and not isinstance(data, Mapping):
            raise _Misfit(f"expected an object, got {type(data).__name__}")
        found: dict[Any, Any] = {}
        for name, item in data.items():
            try:
                found[key(name) if whole else name] = inner(item)
            except _Misfit as misfit:
                misfit.where = f".{name}{misfit.where}"
                raise
            except ValueError as error:
                raise _Misfit(str(error)) from None
        return found

    return mapping


def _member(kind: type[Enum]) -> Callable[[Any], Any]:
    def member(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError as error:
            raise _Misfit(str(error)) from None

    return member


def _scalar(kind: Any) -> Callable[[Any], Any]:
    name = getattr(kind, "__name__", str(kind))

    def scalar(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and (type(data) is int or data in ("nan", "inf", "-inf")):
            return float(data)
        if isinstance(kind, type) and isinstance(data, kind) and not isinstance(data, bool):
            return data
        raise _Misfit(f"expected {name}, got {type(data).__name__}")

    return scalar
