"""The shape of the parts of a suite file: which keys there are, and what may stand there. No part knows another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from zerobench.case import Case
from zerobench.coherence import AXES

MAX_WORLD_SIZE = 4096

T = TypeVar("T")
NAME, CHECK_ID, OPTION_NAME = r"^[a-z0-9-]+$", r"^[a-z]+\.[a-z_]+$", r"^[a-z_][a-z0-9_]*$"
REFERENCE = r"^([a-z0-9-]+|\S+:[A-Za-z_][A-Za-z0-9_]*)$"
PATTERNS = {
    NAME: "should be small letters, digits and dashes, as it stands in ids and names of files",
    CHECK_ID: "should be a check's id, such as memory.at_rest",
    OPTION_NAME: "should be an option's name: small letters, digits and _",
    REFERENCE: "should be a name, package.module:Class or path/to/file.py:Class",
}
"""In words, for messages."""
Name = Annotated[str, StringConstraints(pattern=NAME)]
Reference = Annotated[str, StringConstraints(pattern=REFERENCE)]
CheckId = Annotated[str, StringConstraints(pattern=CHECK_ID)]
WorldSize = Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)]
MicroBatches = Annotated[int, Field(ge=1, le=4096)]
Precision = Literal["fp32", "bf16", "fp16"]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Some = Annotated[tuple[T, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _option(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9._+-]+", value):
        raise ValueError("an option's text stands in ids: letters, digits and . _ + - only")
    if not isinstance(value, (str, bool, int, float)):
        raise ValueError("an option is text, a number or true/false")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("an option's number is finite")
    return value


Picked = Annotated[
    tuple[T, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True}), BeforeValidator(_listed)
]
"""One value or a list of them; none given means any."""
Option = Annotated[Any, AfterValidator(_option), WithJsonSchema({"type": ["string", "number", "boolean"]})]
OptionName = Annotated[str, StringConstraints(pattern=OPTION_NAME)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Steps(Strict):
    """Optimizer steps: `warmup` that are not counted, then `measured` that are."""

    warmup: Annotated[int, Field(ge=0, le=10_000)] = 1
    measured: Annotated[int, Field(ge=1, le=10_000)] = 3


class Matrix(Strict):
    """The axes whose product is the suite's cases. A: micro-batches an optimizer step."""

    implementation: Some[Reference]
    model: Some[Name]
    world_size: Some[WorldSize]
    precision: Some[Precision]
    A: Some[MicroBatches] = (1,)


def _or_one(schema: dict[str, Any]) -> None:
    """In the JSON Schema too, one value stands for a list of one."""
    for key, value in schema["properties"].items():
        if value.get("type") == "array":
            value.pop("default", None)
            schema["properties"][key] = {"title": value.pop("title"), "anyOf": [value["items"], value]}


class Exclude(Strict):
    """The cases that have one of the values given, on each axis given."""

    model_config = ConfigDict(json_schema_extra=_or_one)

    implementation: Picked[Reference] = ()
    model: Picked[Name] = ()
    world_size: Picked[WorldSize] = ()
    precision: Picked[Precision] = ()
    A: Picked[MicroBatches] = ()

    def picks(self) -> dict[str, tuple[Any, ...]]:
        """The values that it names, by axis."""
        return {axis: values for axis in AXES if (values := getattr(self, axis))}

    def matches(self, case: Case) -> bool:
        """Whether it is about `case`. An implementation is meant by its name or by its reference."""
        of: dict[str, tuple[Any, ...]] = {
            "implementation": (case.implementation, case.reference),
            "model": (case.model,),
            "world_size": (case.world_size,),
            "precision": (case.precision,),
            "A": (case.micro_batches,),
        }
        return all(not getattr(self, axis) or set(of[axis]) & set(getattr(self, axis)) for axis in AXES)


class Xfail(Exclude):
    """A check that is known to fail on the cases it matches, and why."""

    check: CheckId
    reason: Text

    def to_json(self) -> dict[str, Any]:
        """What a record keeps of it: only what was given."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Xfail:
        return cls.model_validate_json(json.dumps(data))
