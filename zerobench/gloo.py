"""What gloo puts on the wire for a collective: the cost model by which the traffic log is closed against the sockets.

gloo over TCP (torch 2.11 to 2.13), bytes that a rank receives for a full tensor of S bytes on n ranks:

    all-reduce                  2 (n-1)/n S     a ring: reduce-scatter, then all-gather (gloo/allreduce.cc)
    reduce-scatter              2 (n-1)/n S     torch's gloo backend runs an all-reduce and keeps a part of it
    all-gather, all-to-all      (n-1)/n S       a ring; pairwise
    broadcast                   S, the root 0   a binomial tree: what a rank sends depends on its place
    gather                      (n-1)/n S for the root, 0 for the others
    scatter                     S/n, the root 0
    send, receive               0, S
    barrier                     0
    reduce                      not known: it depends on the rank and on how far the pipeline has come

The same algorithms serve tensors of any size (tests measure all of them on sockets, at n = 2, 3 and 4). So gloo's bytes
are no measure of an implementation: a reduce-scatter costs what an all-reduce does. They close the log, nothing more.
"""

from __future__ import annotations

from fractions import Fraction

from zerobench.record import Call
from zerobench.terms import DTYPE_NBYTES, Collective

HEADER_NBYTES = 48
"""gloo's preamble of each message (gloo/transport/tcp: `Op::preamble`)."""

SEGMENT_NBYTES = 1 << 20
"""The most a ring all-reduce sends in one message (gloo/allreduce.h: maxSegmentSize)."""


def received_nbytes(call: Call, rank: int) -> Fraction | None:
    """Payload bytes that global rank `rank` receives over TCP for `call`; None where gloo's cost of the kind is not
    known.

    Exact up to the rounding of segments, for which `framing_nbytes` allows.
    """
    n = len(call.group)
    if n < 2 or rank not in call.group:
        return Fraction(0)
    whole, share = Fraction(call.nbytes), Fraction(call.nbytes, n)
    match call.kind:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            return 2 * (whole - share)
        case Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            if call.received_numel is not None and call.numel:
                return Fraction(call.received_numel * call.nbytes, call.numel)
            return whole - share
        case Collective.BROADCAST:
            return Fraction(0) if rank == call.root else whole
        case Collective.GATHER:
            return whole - share if rank == call.root else Fraction(0)
        case Collective.SCATTER:
            return Fraction(0) if rank == call.root else share
        case Collective.RECV:
            return whole
        case Collective.SEND | Collective.BARRIER:
            return Fraction(0)
        case _:
            return None


def framing_nbytes(call: Call, n: int) -> int:
    """Bytes beyond the payload that a rank may receive for `call` in a group of `n`: an allowance, never exceeded in
    tests.

    A message costs its receiver two headers ("ready to send", then the payload's own) and its sender one ("ready to
    receive"); a rank has at most as many messages going out as coming in. A ring all-reduce is cut into at least two
    segments a rank, of whole elements: their rounding is allowed for too.
    """
    if n < 2:
        return 0
    tree = (n - 1).bit_length()  # ceil(log2 n)
    rounding = 0
    match call.kind:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            # A reduce-scatter of a list is one all-reduce for each of its n tensors.
            rounds = n if call.op == "reduce_scatter_" else 1
            segments = max(-(-call.nbytes // (rounds * SEGMENT_NBYTES)), 2 * n)
            segments = -(-segments // n) * n
            messages = rounds * 2 * (n - 1) * (segments // n)
            rounding = rounds * 2 * segments * DTYPE_NBYTES.get(call.dtype, 8)
        case Collective.ALL_GATHER:
            messages = 2 * (n - 1)
        case Collective.BROADCAST:
            messages = tree + 1
        case Collective.BARRIER:
            messages = 2 * (n - 1) if call.op == "monitored_barrier_" else tree
        case Collective.SEND | Collective.RECV:
            messages = 1
        case _:
            messages = n - 1
    return 3 * HEADER_NBYTES * messages + rounding
