"""Sample: what one rank saw in one run. Record: the samples of a run, and what it was. Provenance: where and with what.

These are the only things that cross from the side that measures to the side that judges. Units are in the names; bytes
and elements are whole numbers; steps count from 0, the build is step -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zerobench.case import Run
from zerobench.claims import Claims
from zerobench.codec import decode, encode
from zerobench.readings import CPU, DevicePeak, Links, Place, Resident
from zerobench.terms import Collective, Moment

SCHEMA = 2
"""1: what differs from launch to launch stood in its place within the samples, not in `launch` before them."""
UPGRADE = ": upgrade it"
LAUNCH = ("times_s", "run_s", "allocator")
"""The fields of Sample that differ from launch to launch of the same case; all others are mostly the same again."""


@dataclass(frozen=True)
class Call:
    """One collective that this rank issued.

    numel: elements of the full tensor, the S of a ring's cost: an all-reduce's, broadcast's or reduce's tensor; what a
    reduce-scatter takes and an all-gather gives. nbytes: numel x itemsize. group: the ranks, by global number.
    by: the thread that called, "main" or its name. received_numel: elements that come from other ranks, where the
    shares are uneven; None where it is numel (n - 1) / n. communicator: torch's name of the group, alike on its members,
    since several may have the same ranks; "" for the default group.
    """

    step: int
    phase: str  # build, forward, backward, step, read (the suite's own), close
    kind: Collective
    numel: int
    nbytes: int
    dtype: str
    group: tuple[int, ...]
    root: int | None = None
    op: str = ""
    by: str = "main"
    received_numel: int | None = None
    communicator: str = ""


@dataclass(frozen=True)
class Piece:
    """A live storage that no claim covers. by: the operator that made it. looks_like: what its content matches, if
    anything."""

    nbytes: int
    by: str
    looks_like: str | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that one rank holds at one moment, over those that were alive before the engine was built.

    claimed: by category (numel x itemsize of the engine's claim, each region once), one-element tensors left out;
    scalars: those. live: all storages the ledger knows. unclaimed: storage bytes that no claim covers, the excess of a
    storage over the claimed views of it included.
    dtypes: bytes by category and dtype. looks_like: claimed bytes by category whose content matches another category.
    """

    step: int
    moment: Moment
    claimed: Mapping[str, int]
    live: int
    unclaimed: int
    scalars: int = 0
    pieces: tuple[Piece, ...] = ()
    dtypes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """The most bytes alive within one phase of a step, over the baseline. backend: the most that were the backend's own
    temporaries, made inside a collective, at that time (part of nbytes)."""

    step: int
    phase: str
    nbytes: int
    backend: int = 0


@dataclass(frozen=True)
class Boundary:
    """Live bytes between two units, inside forward or backward, and in the same model run bare. calls: collectives that
    this rank had issued by then."""

    step: int
    unit: str
    live: int
    bare: int
    phase: str = "backward"
    calls: int = 0


@dataclass(frozen=True)
class Flight:
    """A gradient collective under way in the last step. hidden: the share of its time in flight in which this rank
    computed, 0 to 1. weight: what it counts for beside others, its microseconds on a device's timeline, and its
    elements where it was held in flight for the time of one unit (`probes.flight`)."""

    kind: Collective
    weight: float
    hidden: float


@dataclass(frozen=True)
class Wire:
    """What the sockets of this rank's backend carried over `steps` steps, and the messages they needed."""

    steps: int
    received_nbytes: int
    sent_nbytes: int
    sockets: int


@dataclass(frozen=True)
class Comparison:
    """One tensor at one step against what it should be.

    mismatches: elements that differ. max_abs, max_ulp: largest difference. worst: the largest difference over its
    derived bound (at most 1 is right). factor: what the tensor is a constant multiple of the right one by. first:
    first wrong index.
    """

    step: int
    what: str
    name: str
    numel: int
    mismatches: int
    max_abs: float = 0.0
    max_ulp: float = 0.0
    worst: float = 0.0
    factor: float | None = None
    first: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Digest:
    """A fingerprint of tensors' bits at one step: equal digests, equal bits."""

    step: int
    what: str
    value: str
    nbytes: int = 0


@dataclass(frozen=True)
class Report:
    """What `step` returned."""

    step: int
    loss: float
    skipped: bool = False
    grad_norm: float | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why a rank did not finish. kind: raised, died, hung, refused; or a consequence of another rank's: waiting (in a
    collective, for one that failed), stopped (still running when another had failed). last_call: the last collective it
    entered.
    """

    kind: str
    what: str
    phase: str = ""
    step: int = -1
    stack: str = ""
    last_call: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one rank saw.

    allocator: for each of `holdings` an independent count of what is `live` there, the C allocator's on a CPU, the caching
    allocator's requested bytes on CUDA (and for what lies elsewhere the ledger's own); None where it does not count.
    """

    rank: int
    calls: tuple[Call, ...] = ()
    holdings: tuple[Holding, ...] = ()
    allocator: tuple[int | None, ...] = ()
    peaks: tuple[Peak, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    bare_peaks: tuple[Peak, ...] = ()  # of the same model run bare, over its parameters; step -1
    flights: tuple[Flight, ...] | None = None  # None where it was not looked at, or the model marks no units
    wire: Wire | None = None
    times_s: tuple[float, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    digests: tuple[Digest, ...] = ()
    reports: tuple[Report, ...] = ()
    updated_numel: int | None = None  # elements that the optimizer updated in the last step
    changed: tuple[str, ...] = ()  # global state that the subject left changed
    failure: Failure | None = None
    place: Place = CPU
    residents: tuple[Resident, ...] = ()
    device_peaks: tuple[DevicePeak, ...] = ()
    links: Links | None = None
    run_s: float = 0.0  # seconds from the rank's first line to its last
    faked: tuple[str, ...] = ()  # simulated: values that decide, which the subject asked for and nobody knows
    shimmed: tuple[str, ...] = ()  # what the implementation was given a stand-in for, in its own words
    libraries: tuple[str, ...] = ()  # what stands behind the implementation, each with its version

    def witnessed(self, holding: Holding) -> int | None:
        """What the allocator counted at one of `holdings`."""
        counts = zip(self.holdings, self.allocator, strict=False)
        return next((count for held, count in counts if held is holding), None)


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run. psi: trainable elements, a tied weight once; units: trainable elements of each, the rest
    last."""

    psi: int
    frozen: int = 0
    buffers_nbytes: int = 0
    units: tuple[int, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    bucket_numel: int | None = None
    examples: int = 0  # of a rank and micro-batch
    tokens: int = 0  # of a rank and micro-batch


@dataclass(frozen=True, slots=True)
class Record:
    """One run: what it was, what came of it, one sample a rank.

    status: "ok", "error" (a rank raised, died, hung or was refused: samples say which), "skip" (unsupported or
    unavailable, `reason`), "invalid" (an instrument failed its self-test).
    """

    suite: str
    run: Run
    status: str
    reason: str = ""
    claims: Claims | None = None
    model: ModelFacts | None = None
    samples: tuple[Sample, ...] = ()
    wall_s: float = 0.0
    provenance: str = ""  # the id of the Provenance line above it
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def partial(self) -> bool:
        """Whether only some ranks ran, as in a large simulated world: the samples say which."""
        return 0 < len(self.samples) < self.run.case.world_size

    @property
    def shimmed(self) -> tuple[str, ...]:
        """What was not the real thing, so that nothing here is a verdict on the library that the subject stands for."""
        return tuple(dict.fromkeys(what for sample in self.samples for what in sample.shimmed))

    @property
    def libraries(self) -> tuple[str, ...]:
        """Name and version of what stands behind the implementation, beside torch and zerobench."""
        return tuple(dict.fromkeys(what for sample in self.samples for what in sample.libraries))

    @property
    def faked(self) -> tuple[str, ...]:
        """What makes a simulated record provisional: values that were made up, on any rank."""
        return tuple(dict.fromkeys(what for sample in self.samples for what in sample.faked))

    def to_json(self) -> dict[str, Any]:
        body = encode(self) | {"claims": self.claims.to_json() if self.claims else None}
        samples = body.pop("samples")
        launch = {name: [sample.pop(name) for sample in samples] for name in LAUNCH}
        return {"record": body | {"launch": launch, "samples": samples}}

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Raises ValueError for what is not a record of a schema known here."""
        body = data.get("record") if isinstance(data, Mapping) else None
        if not isinstance(body, Mapping):
            raise ValueError("not a zerobench record")
        if not isinstance(body.get("schema"), int) or body["schema"] > SCHEMA:
            raise ValueError(f"record schema {body.get('schema')!r}; this zerobench reads up to {SCHEMA}{UPGRADE}")
        claims = body.get("claims")
        kept = {k: v for k, v in body.items() if k not in ("claims", "launch")}
        kept["samples"] = _whole(body) if body["schema"] > 1 else _allocated(body.get("samples", []))
        kept["schema"] = SCHEMA
        kept["claims"] = None
        record = decode(cls, kept, "record")
        try:
            return record if claims is None else replace(record, claims=Claims.from_json(claims))
        except KeyError as missing:
            raise ValueError(f"record.claims.{missing.args[0]} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"record.claims: {error}") from None


def _whole(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of a record, each with what stands in `launch` for it."""
    samples, launch = body.get("samples", []), body.get("launch", {})
    if not isinstance(samples, list) or not isinstance(launch, Mapping):
        raise ValueError("record.samples and record.launch are a list and an object")
    whole = [dict(sample) if isinstance(sample, Mapping) else sample for sample in samples]
    for name in LAUNCH if samples else ():
        each = launch.get(name, [])
        if not isinstance(each, list) or len(each) != len(samples):
            raise ValueError(f"record.launch.{name}: expected a list of {len(samples)}, one for each of the samples")
        for sample, value in zip(whole, each, strict=True):
            if isinstance(sample, dict):
                sample[name] = value
    return whole


def _allocated(samples: Any) -> Any:
    """Samples of schema 1, where the allocator's count was a part of each holding."""
    out = []
    for sample in samples if isinstance(samples, list) else ():
        holdings = sample.get("holdings", []) if isinstance(sample, Mapping) else None
        if not isinstance(holdings, list):
            return samples  # the codec says what is wrong with it
        counts = [h.get("allocator") if isinstance(h, Mapping) else None for h in holdings]
        out.append({**sample, "allocator": counts})
    return out if isinstance(samples, list) else samples


@dataclass(frozen=True)
class Provenance:
    """Where records were made, and with what. One line in a results file stands above the records that it is about."""

    id: str
    zerobench: str
    suite: str
    suite_digest: str
    host: str
    started: str
    commit: str | None = None
    dirty: bool | None = None
    python: str = ""
    torch: str = ""
    backend: str = ""
    device: str = "cpu"
    device_count: int = 0  # accelerators; 0 on a CPU, where `cores` counts
    interconnect: str = ""  # between them: "nvlink", "pcie"; "" where there is none or it is not known
    driver: str = ""
    cpu: str = ""
    cores: int = 0
    kernel: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[Mapping[str, Any], ...] = ()  # the suite's cases, expanded: a verdict needs nothing else
    checks: tuple[str, ...] = ()
    judge: str = "paper"
    xfail: tuple[Mapping[str, Any], ...] = ()
    hosts: tuple[str, ...] = ()  # the machine of each process, in a job of several; empty where `host` has all ranks
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return {"provenance": encode(self)}

    @classmethod
    def from_json(cls, data: Any) -> Provenance:
        body = data.get("provenance") if isinstance(data, Mapping) else None
        if not isinstance(body, Mapping):
            raise ValueError("not a zerobench provenance line")
        if not isinstance(body.get("schema"), int) or body["schema"] > SCHEMA:
            raise ValueError(f"schema {body.get('schema')!r}; this zerobench reads up to {SCHEMA}{UPGRADE}")
        return decode(cls, body, "provenance")
