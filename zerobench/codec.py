"""Dataclasses to and from JSON: what a record is written with.

`decode` is strict about types it is told and lenient about keys it does not know: a reader of this version can read a
later minor version's record. NaN and infinities, which JSON has not, travel as the words "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


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
        return [encode(v) for v in value]
    raise TypeError(f"cannot be written to a record: {type(value).__name__}")


def decode(kind: type[T], data: Any, where: str = "") -> T:
    """The value of type `kind` that `data` stands for. Raises ValueError naming the field that does not fit."""
    return _decode(kind, data, where or kind.__name__)  # type: ignore[no-any-return]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _decode(next(a for a in get_args(kind) if a is not type(None)), data, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
        hints = _hints(kind)  # type: ignore[arg-type]
        known = {f.name for f in dataclasses.fields(kind)} & set(data)
        try:
            return kind(**{k: _decode(hints[k], data[k], f"{where}.{k}") for k in known})  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
    if origin in (tuple, list):
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list, got {type(data).__name__}")
        args = get_args(kind)
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if len(args) != len(data):
                raise ValueError(f"{where}: expected {len(args)} items, got {len(data)}")
            return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))
        return origin(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
        key, value = get_args(kind)
        return {_key(key, k, where): _decode(value, v, f"{where}.{k}") for k, v in data.items()}
    if (
        kind is float
        and (isinstance(data, (int, float)) or data in ("nan", "inf", "-inf"))
        and not isinstance(data, bool)
    ):
        return float(data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if isinstance(kind, type) and isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    raise ValueError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {type(data).__name__}")


def _key(kind: Any, key: str, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, (Enum, int)):
        try:
            return kind(key)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return key
