"""What NCCL puts on a ring of NVLinks: the cost model by which the traffic log is closed against the GPU's counters.

With one algorithm pinned, a rank sends for a full tensor of S bytes on n ranks (nccl-tests, doc/PERFORMANCE.md):

    all-reduce 2 (n-1)/n S        reduce-scatter, all-gather, all-to-all (n-1)/n S        send S

Trees, NVLS (which sums inside the switch) and the low-latency protocols (which send flags beside data) move other
amounts for the same call: the model speaks of the canonical settings alone. What a rooted collective costs depends on
the rank's place in the ring: not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from zerobench.record import Call
from zerobench.terms import Collective

CANONICAL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""Set, before the group exists, for runs whose wire is read; never for those that are timed."""

COUNTER_NBYTES = 1024
"""What NVLink's data counters count in: each link's reading may be off by one."""


def deviations(settings: Mapping[str, str]) -> list[str]:
    """Where `settings` are not canonical: "NCCL_ALGO=Tree, not Ring"."""
    found = [(name, settings.get(name, "unset"), value) for name, value in CANONICAL.items()]
    return [f"{name}={is_}, not {value}" for name, is_, value in found if is_ != value]


def sent_nbytes(call: Call, rank: int) -> Fraction | None:
    """Payload bytes that global rank `rank` sends for `call`; None where the cost of the kind is not known."""
    n = len(call.group)
    if n < 2 or rank not in call.group:
        return Fraction(0)
    match call.kind:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return call.kind.wire_factor(n) * call.nbytes
        case Collective.SEND:
            return Fraction(call.nbytes)
        case Collective.RECV:
            return Fraction(0)
        case Collective.BARRIER:
            return Fraction(0)
        case _:
            return None
